// What only CUDA has: its devices and the products with few rows.
#include <pybind11/pybind11.h>

#include "backend.h"
#include "bind.h"

namespace py = pybind11;

namespace pagemill::bindings {
namespace {

int32_t cuda_device_count() {
  int32_t count = 0;
  raise_on(backend(DeviceType::kCuda), call(cuda_functions().device_count, "device_count", &count));
  return count;
}

CudaDeviceInfo cuda_device_info(int32_t device) {
  CudaDeviceInfo info{};
  raise_on(backend(DeviceType::kCuda), call(cuda_functions().device_info, "device_info", device, &info));
  return info;
}

struct SkinnyLinear {
  SkinnyLinearParams params{};

  SkinnyLinear(int64_t num_rows, int64_t num_outputs, int64_t num_inputs, int64_t out_stride, int64_t x_stride,
               int dtype, bool is_gated) {
    params.num_rows = num_rows;
    params.num_outputs = num_outputs;
    params.num_inputs = num_inputs;
    params.out_stride = out_stride;
    params.x_stride = x_stride;
    params.dtype = static_cast<DType>(dtype);
    params.is_gated = is_gated;
  }

  int64_t workspace_bytes() const {
    return call(cuda_functions().skinny_linear_workspace, "skinny_linear_workspace", &params);
  }

  bool wins() const { return call(cuda_functions().skinny_linear_wins, "skinny_linear_wins", &params) != 0; }

  void run(Address out, Address x, Address weight, Address workspace, int64_t workspace_bytes, Address stream) const {
    SkinnyLinearParams p = params;
    p.out = pointer<void>(out);
    p.x = pointer<void>(x);
    p.weight = pointer<void>(weight);
    p.workspace = pointer<void>(workspace);
    p.workspace_bytes = workspace_bytes;
    raise_on(backend(DeviceType::kCuda),
             call(cuda_functions().skinny_linear, "skinny_linear", &p, pointer<void>(stream)));
  }
};

}  // namespace

void bind_cuda(py::module_& module) {
  py::class_<CudaDeviceInfo>(module, "CudaDeviceInfo")
      .def_readonly("compute_capability", &CudaDeviceInfo::compute_capability)
      .def_readonly("num_multiprocessors", &CudaDeviceInfo::num_multiprocessors)
      .def_readonly("l2_bytes", &CudaDeviceInfo::l2_bytes)
      .def_readonly("memory_bytes", &CudaDeviceInfo::memory_bytes)
      .def_property_readonly("name", [](const CudaDeviceInfo& info) { return info.name; });
  module.def("cuda_device_count", &cuda_device_count);
  module.def("cuda_device_info", &cuda_device_info);
  py::class_<SkinnyLinear>(module, "SkinnyLinear")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int, bool>())
      .def("workspace_bytes", &SkinnyLinear::workspace_bytes)
      .def("wins", &SkinnyLinear::wins)
      .def("run", &SkinnyLinear::run);
}

}  // namespace pagemill::bindings
