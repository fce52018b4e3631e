#include "skinny_linear_launch.cuh"
#include "skinny_linear_launch.h"

namespace pagemill::cuda {

int launch_skinny_linear_f16(const SkinnyLinearParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  return launch_skinny_linear<__half>(params, limits, stream);
}

}  // namespace pagemill::cuda
