// The module worker.kernels._C: integers and addresses in, nothing decided here. The Python face validates the tensors.
//
// Each class holds the shapes, strides and dtype of one validated combination; run() takes what changes from call to
// call. Small kernels keep the GIL: taking it back can cost more than the kernel.
#include <pybind11/pybind11.h>

#include <string>

#include "bind.h"
#include "pagemill/cpu_features.h"
#include "pagemill/thread_pool.h"

namespace py = pybind11;
using namespace pagemill;

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native kernels of Pagemill; use worker.kernels, which validates its arguments.";
  module.def("num_threads", &num_threads);
  module.def("set_num_threads", &set_num_threads);
  module.def("cpu_isa", [] { return std::string(cpu_isa_name(cpu_isa())); });
  module.def("best_cpu_isa", [] { return std::string(cpu_isa_name(best_cpu_isa())); });
  module.def("set_cpu_isa", [](const std::string& name) { set_cpu_isa(parse_cpu_isa(name)); });
  bindings::bind_rows(module);
  bindings::bind_step(module);
  bindings::bind_attention(module);
  bindings::bind_sampling(module);
  bindings::bind_linear(module);
  bindings::bind_program(module);
  bindings::bind_cuda(module);
}
