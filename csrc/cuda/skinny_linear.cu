// Checks, the rule where the kernel pays, and the choice of dtype.
#include <algorithm>
#include <cstdint>
#include <iterator>

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

// Weights for which this kernel was faster than cuBLAS 13 on an H200, 7 % at least over each box as a whole, and slower
// in no cell of it. Products alone: benchmarks/skinny_linear_grid.py, benchmarks/results/skinny_linear_h200.csv; behind
// a norm, as in a model, where the ring fills while that one runs: benchmarks/results/skinny_linear_overlap_h200.csv.
// Fewer outputs with more inputs leave too few rows per multiprocessor.
struct WinningBox {
  int64_t min_outputs, max_outputs, min_inputs, max_inputs, max_rows;
};
constexpr WinningBox kWinningBoxes[] = {
    {256, 1023, 1024, 6144, 16},     // 1.59 up to 8 rows, 1.49 with 16
    {4097, 7168, 3072, 14336, 16},   // 1.14, 1.09
    {1024, 4096, 1024, 16384, 16},   // 1.38, 1.31; 16384 inputs: 1.20, 1.11
    {4097, 12288, 2048, 8192, 16},   // 1.12, 1.07
    {10240, 12288, 3072, 11008, 8},  // 1.11
};
// Gated, against a product of cuBLAS and a kernel for the activation.
constexpr WinningBox kWinningGatedBoxes[] = {
    {2048, 28672, 1024, 8192, 16},  // 1.15, 1.08; larger weights leave less to gain: 1.02 to 1.19 at 28672 x 8192
};

bool is_inside(const WinningBox& box, const SkinnyLinearParams& p) {
  return p.num_outputs >= box.min_outputs && p.num_outputs <= box.max_outputs && p.num_inputs >= box.min_inputs &&
         p.num_inputs <= box.max_inputs && p.num_rows <= box.max_rows;
}

template <size_t kCount>
bool is_inside_any(const WinningBox (&boxes)[kCount], const SkinnyLinearParams& p) {
  return std::any_of(std::begin(boxes), std::end(boxes), [&](const WinningBox& box) { return is_inside(box, p); });
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
  // Other generations have not been measured.
  const cuda::DeviceLimits* limits = cuda::device_limits();
  if (limits == nullptr || limits->compute_capability != 90) return 0;
  if (cuda::check_sizes(*params) != 0) return 0;
  const bool wins = params->is_gated ? cuda::is_inside_any(cuda::kWinningGatedBoxes, *params)
                                     : cuda::is_inside_any(cuda::kWinningBoxes, *params);
  return wins ? 1 : 0;
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
