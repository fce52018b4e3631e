#include "skinny_linear_launch.cuh"
#include "skinny_linear_launch.h"

namespace pagemill::cuda {

int launch_skinny_linear_bf16(const SkinnyLinearParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return launch_skinny_linear<__nv_bfloat16>(params, limits, stream);
}

}  // namespace pagemill::cuda
