// Checks, the rule where the kernel pays, and the choice of dtype.
#include <cstdint>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "skinny_linear_launch.h"

namespace pagemill::cuda {
namespace {

constexpr int64_t kMaxRows = 16;
constexpr int64_t kMaxSize = int64_t{1} << 30;

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

int check_sizes(const SkinnyLinearParams& p) {
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return fail("skinny_linear: dtype %d is not supported; supported: bfloat16, float16", static_cast<int>(p.dtype));
  }
  if (p.num_rows < 0 || p.num_rows > kMaxRows) {
    return fail("skinny_linear: num_rows is %lld; at most %lld are supported", static_cast<long long>(p.num_rows),
                static_cast<long long>(kMaxRows));
  }
  if (p.num_outputs < 0 || p.num_outputs > kMaxSize) {
    return fail("skinny_linear: num_outputs is %lld; at most 2^30 are supported",
                static_cast<long long>(p.num_outputs));
  }
  if (p.num_inputs < 0 || p.num_inputs > kMaxSize || p.num_inputs % 8 != 0) {
    return fail("skinny_linear: num_inputs is %lld; multiples of 8 up to 2^30 are supported",
                static_cast<long long>(p.num_inputs));
  }
  return 0;
}

int check_memory(const SkinnyLinearParams& p) {
  if (p.num_rows > 1 && p.x_stride % 8 != 0) {
    return fail("skinny_linear: x_stride is %lld; multiples of 8 are supported", static_cast<long long>(p.x_stride));
  }
  if (!is_aligned(p.x)) return fail("skinny_linear: x is not aligned to 16 bytes");
  if (!is_aligned(p.weight)) return fail("skinny_linear: weight is not aligned to 16 bytes");
  return 0;
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int64_t pagemill_cuda_skinny_linear_workspace(const SkinnyLinearParams* params) {
  (void)params;  // each output is summed inside one thread block
  return 0;
}

int32_t pagemill_cuda_skinny_linear_wins(const SkinnyLinearParams* params) {
  (void)params;
  return 0;
}

int pagemill_cuda_skinny_linear(const SkinnyLinearParams* params, void* stream) {
  const SkinnyLinearParams& p = *params;
  if (const int error = cuda::check_sizes(p)) return error;
  if (p.num_rows == 0 || p.num_outputs == 0) return 0;
  if (const int error = cuda::check_memory(p)) return error;
  const cuda::DeviceLimits* limits = cuda::device_limits();
  if (limits == nullptr) return 1;
  const auto launch = p.dtype == DType::kBFloat16 ? cuda::launch_skinny_linear_bf16 : cuda::launch_skinny_linear_f16;
  return launch(p, *limits, static_cast<cudaStream_t>(stream));
}
}
