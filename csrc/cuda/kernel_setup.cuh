// What a kernel needs once per device before its first launch: leave to use much shared memory, and how many of its
// blocks a device runs at once.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>

#include "error.h"

namespace pagemill::cuda {

struct KernelSetup {
  cudaError_t error;
  int resident_blocks;  // on the whole device
  int architecture;     // that the kernel's code was compiled for: 90 for sm_90
};

// Of the current device. Legal while a stream is captured.
template <auto kKernel>
const KernelSetup& kernel_setup(int threads, int shared_bytes) {
  constexpr int kMaxDevices = 64;
  static KernelSetup setups[kMaxDevices];
  static std::once_flag made[kMaxDevices];
  int device = 0;
  cudaGetDevice(&device);
  device = std::min(device, kMaxDevices - 1);
  std::call_once(made[device], [&] {
    KernelSetup& setup = setups[device];
    int per_multiprocessor = 0, num_multiprocessors = 0;
    cudaFuncAttributes attributes{};
    setup.error = cudaFuncGetAttributes(&attributes, kKernel);
    setup.architecture = attributes.ptxVersion;
    if (setup.error == cudaSuccess) {
      setup.error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    }
    if (setup.error == cudaSuccess) {
      setup.error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kKernel, threads, shared_bytes);
    }
    if (setup.error == cudaSuccess) {
      setup.error = cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    }
    setup.resident_blocks = per_multiprocessor * num_multiprocessors;
    if (setup.error == cudaSuccess && setup.resident_blocks == 0) setup.error = cudaErrorLaunchOutOfResources;
  });
  return setups[device];
}

}  // namespace pagemill::cuda
