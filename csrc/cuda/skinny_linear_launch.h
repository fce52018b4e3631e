// What skinny_linear.cu chooses from. The functions check nothing that it has checked, and return 0 or what fail()
// gave.
#pragma once

#include <cuda_runtime.h>

#include "error.h"
#include "pagemill/cuda_kernels.h"

namespace pagemill::cuda {

int launch_skinny_linear_bf16(const SkinnyLinearParams& params, const DeviceLimits& limits, cudaStream_t stream);
int launch_skinny_linear_f16(const SkinnyLinearParams& params, const DeviceLimits& limits, cudaStream_t stream);

}  // namespace pagemill::cuda
