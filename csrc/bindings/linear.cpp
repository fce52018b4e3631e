// pybind11 face of linear.h. Addresses and shapes come from worker/kernels/linear.py, which knows the tensors.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "bind.h"
#include "pagemill/cpu_features.h"
#include "pagemill/linear.h"
#include "pagemill/thread_pool.h"

namespace py = pybind11;

namespace pagemill {
namespace {

template <typename Element>
Element* from_address(uintptr_t address) {
  return reinterpret_cast<Element*>(address);
}

std::unique_ptr<PackedLinear> pack(uintptr_t weight, int64_t num_rows, int64_t num_columns, int64_t row_stride,
                                   int dtype, uintptr_t bias, int order, const std::string& isa) {
  const ConstMatrixView view = {from_address<const void>(weight), num_rows, num_columns, row_stride,
                                static_cast<DType>(dtype)};
  return std::make_unique<PackedLinear>(view, from_address<const float>(bias), static_cast<WeightOrder>(order),
                                        isa.empty() ? cpu_isa() : parse_cpu_isa(isa));
}

// Products that take about a millisecond or more let other Python threads run. The many short ones of a decode step
// keep the interpreter lock: to get it back can take longer than the product.
bool is_long(const PackedLinear& linear, int64_t num_rows) {
  constexpr int64_t kLongBytes = 32 << 20;
  constexpr int64_t kLongMultiplications = int64_t{1} << 29;
  return linear.num_bytes() >= kLongBytes ||
         num_rows * linear.in_features() * linear.out_features() >= kLongMultiplications;
}

void apply(const PackedLinear& linear, uintptr_t x, int64_t num_rows, int64_t x_stride, uintptr_t out,
           int64_t out_stride, int out_dtype, int epilogue) {
  const ConstMatrixView x_view = {from_address<const void>(x), num_rows, linear.in_features(), x_stride,
                                  linear.dtype()};
  const MatrixView out_view = {from_address<void>(out), num_rows, linear.out_features(), out_stride,
                               static_cast<DType>(out_dtype)};
  if (is_long(linear, num_rows)) {
    py::gil_scoped_release release;
    linear.apply(x_view, out_view, static_cast<LinearEpilogue>(epilogue));
  } else {
    linear.apply(x_view, out_view, static_cast<LinearEpilogue>(epilogue));
  }
}

}  // namespace

namespace bindings {

void bind_linear(py::module_& module) {
  py::class_<PackedLinear>(module, "PackedLinear")
      .def(py::init(&pack), py::call_guard<py::gil_scoped_release>())
      .def("apply", &apply)
      .def(
          "unpack", [](const PackedLinear& linear, uintptr_t weight) { linear.unpack(from_address<void>(weight)); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("num_bytes", &PackedLinear::num_bytes)
      .def_property_readonly("isa", [](const PackedLinear& linear) { return std::string(cpu_isa_name(linear.isa())); });
  module.def("probe_read_bandwidth", &probe_read_bandwidth, py::call_guard<py::gil_scoped_release>());
  module.def("probe_bf16_peak", &probe_bf16_peak, py::call_guard<py::gil_scoped_release>());
}

}  // namespace bindings
}  // namespace pagemill
