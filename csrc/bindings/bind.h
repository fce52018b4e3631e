// The parts of the module.
#pragma once

#include <pybind11/pybind11.h>

namespace pagemill::bindings {

void bind_rows(pybind11::module_& module);
void bind_step(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_sampling(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);

}  // namespace pagemill::bindings
