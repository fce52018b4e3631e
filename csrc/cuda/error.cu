#include "error.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "pagemill/cuda_kernels.h"

namespace pagemill::cuda {
namespace {

thread_local char message[512] = "";
constexpr int kMaxDevices = 64;

}  // namespace

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  return kRefused;
}

int check_cuda(const char* operation, cudaError_t error) {
  if (error == cudaSuccess) return 0;
  fail("%s: %s (%s)", operation, cudaGetErrorString(error), cudaGetErrorName(error));
  return kCudaFailed;
}

const DeviceLimits* device_limits() {
  static DeviceLimits limits[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  int device = 0;
  if (check_cuda("cudaGetDevice", cudaGetDevice(&device)) != 0) return nullptr;
  if (device >= kMaxDevices) {
    fail("device %d is not supported: at most %d devices are", device, kMaxDevices);
    return nullptr;
  }
  std::call_once(asked[device], [&] {
    DeviceLimits& l = limits[device];
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    cudaDeviceGetAttribute(&l.num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&l.shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    l.compute_capability = major * 10 + minor;
  });
  return &limits[device];
}

}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

const char* pagemill_cuda_last_error() { return cuda::message; }

int pagemill_cuda_device_count(int32_t* count) {
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  *count = 0;
  // Without a driver or a device there are none; that is an answer, not a failure.
  if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return 0;
  }
  if (const int status = cuda::check_cuda("cudaGetDeviceCount", error)) return status;
  *count = found;
  return 0;
}

int pagemill_cuda_device_info(int32_t device, CudaDeviceInfo* info) {
  cudaDeviceProp properties;
  if (const int error = cuda::check_cuda("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device))) {
    return error;
  }
  info->compute_capability = properties.major * 10 + properties.minor;
  info->num_multiprocessors = properties.multiProcessorCount;
  info->l2_bytes = properties.l2CacheSize;
  info->memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  std::strncpy(info->name, properties.name, sizeof(info->name) - 1);
  info->name[sizeof(info->name) - 1] = '\0';
  return 0;
}
}
