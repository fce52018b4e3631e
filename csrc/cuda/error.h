// Failure of a C function: a message for pagemill_cuda_last_error() and a non-zero status.
#pragma once

#include <cuda_runtime.h>

namespace pagemill::cuda {

// Statuses: an argument is wrong; CUDA failed.
constexpr int kRefused = 1, kCudaFailed = 2;

// Formats like printf and returns kRefused.
[[gnu::format(printf, 1, 2)]] int fail(const char* format, ...);

// 0, or kCudaFailed with the name of the operation and of CUDA's error. Call as check_cuda("rms_norm",
// cudaGetLastError()).
int check_cuda(const char* operation, cudaError_t error);

// Of the current device; asked once per device and process.
struct DeviceLimits {
  int compute_capability;  // 90 for 9.0
  int num_multiprocessors;
  int shared_bytes_per_block;  // with opt-in
};
// null with fail() where there is no device.
const DeviceLimits* device_limits();

}  // namespace pagemill::cuda
