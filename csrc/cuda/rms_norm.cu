#include <algorithm>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kWarpRowThreads = 128;
constexpr int kAnyWidthThreads = 256;

__device__ __forceinline__ float sum_of_lanes(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Every thread of the block gets the sum.
__device__ __forceinline__ float sum_of_block(float x, float* warp_sums) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  x = sum_of_lanes(x, kWarpLanes);
  if (lane == 0) warp_sums[warp] = x;
  __syncthreads();
  const int warps = blockDim.x / kWarpLanes;
  return sum_of_lanes(lane < warps ? warp_sums[lane] : 0.0f, kWarpLanes);
}

__device__ __forceinline__ float norm_scale(float sum_of_squares, const RmsNormParams& p) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(p.hidden) + p.epsilon);
}

template <typename X, typename R, int kCount>
__device__ __forceinline__ Pack<R, kCount> add_packs(const Pack<X, kCount>& a, const Pack<R, kCount>& b) {
  Floats<kCount> sum = to_floats(a);
  const Floats<kCount> added = to_floats(b);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum.values[i] += added.values[i];
  return to_pack<R>(sum);
}

template <typename X, int kCount>
__device__ __forceinline__ float sum_of_squares(const Pack<X, kCount>& pack, float sum) {
  const Floats<kCount> floats = to_floats(pack);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(floats.values[i], floats.values[i], sum);
  return sum;
}

template <typename R, typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> scale_pack(const Pack<R, kCount>& pack, float scale,
                                                      const Pack<T, kCount>& weight) {
  Floats<kCount> out = to_floats(pack);
  const Floats<kCount> weights = to_floats(weight);
#pragma unroll
  for (int i = 0; i < kCount; ++i) out.values[i] = out.values[i] * scale * weights.values[i];
  return to_pack<T>(out);
}

// The types of a row. X: of x; R: of the residual, which is X or wider; T: of out and weight.
template <typename XType, typename RType, typename TType>
struct Row {
  using X = XType;
  using R = RType;
  using T = TType;
  static constexpr int kCount = kPackOf<R>;  // elements of a pack
};

// What one thread holds of a row: packs first, first + step, ..
template <typename Row, int kPacks>
struct RowPart {
  using X = typename Row::X;
  using R = typename Row::R;
  static constexpr int kCount = Row::kCount;
  Pack<X, kCount> x[kPacks];
  Pack<R, kCount> sums[kPacks];  // the residual; after accumulate() what is normalised

  __device__ __forceinline__ void load(const RmsNormParams& p, int64_t row, int first, int step, int num_packs) {
    const X* source = static_cast<const X*>(p.x) + row * p.x_stride;
    const R* residual = static_cast<const R*>(p.residual) + row * p.residual_stride;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int i = first + j * step;
      if (i >= num_packs) break;
      x[j] = load_pack<kCount>(source + i * kCount);
      if (p.residual != nullptr) sums[j] = load_pack<kCount>(residual + i * kCount);
    }
  }

  // Adds the residual and stores the sum, which is what is normalised then. Returns the sum of squares.
  __device__ __forceinline__ float accumulate(const RmsNormParams& p, int64_t row, int first, int step, int num_packs) {
    R* residual = static_cast<R*>(p.residual) + row * p.residual_stride;
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int i = first + j * step;
      if (i >= num_packs) break;
      if (p.residual != nullptr) {
        // The stored, rounded value is what the next layer sees.
        sums[j] = add_packs(x[j], sums[j]);
        store_pack(residual + i * kCount, sums[j]);
      } else if constexpr (std::is_same_v<X, R>) {
        sums[j] = x[j];
      }
      sum = sum_of_squares(sums[j], sum);
    }
    return sum;
  }
};

template <typename Row, int kPacks>
struct WeightPart {
  using T = typename Row::T;
  static constexpr int kCount = Row::kCount;
  // Kept in registers where there is room.
  static constexpr bool kIsKept = kPacks <= 2;
  Pack<T, kCount> kept[kIsKept ? kPacks : 1];

  __device__ __forceinline__ void load(const RmsNormParams& p, int first, int step, int num_packs) {
    if constexpr (kIsKept) {
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int i = first + j * step;
        if (i < num_packs) kept[j] = load_pack<kCount>(static_cast<const T*>(p.weight) + i * kCount);
      }
    }
  }
  __device__ __forceinline__ void scale(const RmsNormParams& p, int64_t row, int first, int step, int num_packs,
                                        float scale, const RowPart<Row, kPacks>& part) {
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int i = first + j * step;
      if (i >= num_packs) break;
      if constexpr (!kIsKept) kept[0] = load_pack<kCount>(static_cast<const T*>(p.weight) + i * kCount);
      store_pack(out + i * kCount, scale_pack(part.sums[j], scale, kept[kIsKept ? j : 0]));
    }
  }
};

// A block takes every gridDim-th row. The next row is on its way while this one's sum is made.
template <typename Row, int kPacks>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_block_kernel(const __grid_constant__ RmsNormParams p) {
  __shared__ float warp_sums[2][kWarpLanes];
  const int num_packs = static_cast<int>(p.hidden / Row::kCount);
  const int first = threadIdx.x, step = blockDim.x;
  constexpr bool kReadsAhead = kPacks <= 2;
  wait_for_previous_kernel();
  RowPart<Row, kPacks> part, next;
  WeightPart<Row, kPacks> weight;
  int64_t row = blockIdx.x;
  part.load(p, row, first, step, num_packs);
  weight.load(p, first, step, num_packs);
  for (int turn = 0; row < p.num_tokens; turn ^= 1) {
    const int64_t next_row = row + gridDim.x;
    if (kReadsAhead && next_row < p.num_tokens) next.load(p, next_row, first, step, num_packs);
    const float sum = part.accumulate(p, row, first, step, num_packs);
    // Two places in turn save a second barrier.
    const float scale = norm_scale(sum_of_block(sum, warp_sums[turn]), p);
    weight.scale(p, row, first, step, num_packs, scale, part);
    row = next_row;
    if constexpr (kReadsAhead) {
      part = next;
    } else if (row < p.num_tokens) {
      part.load(p, row, first, step, num_packs);
    }
  }
}

// kLanes lanes for each row: head norms.
template <typename Row, int kLanes>
__global__ void __launch_bounds__(kWarpRowThreads) rms_norm_lanes_kernel(const __grid_constant__ RmsNormParams p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kWarpRowThreads / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  // Lanes without a row take part in the shuffles.
  const int num_packs = row < p.num_tokens ? static_cast<int>(p.hidden / Row::kCount) : 0;
  wait_for_previous_kernel();
  RowPart<Row, 1> part;
  WeightPart<Row, 1> weight;
  part.load(p, row, lane, kLanes, num_packs);
  weight.load(p, lane, kLanes, num_packs);
  const float sum = part.accumulate(p, row, lane, kLanes, num_packs);
  weight.scale(p, row, lane, kLanes, num_packs, norm_scale(sum_of_lanes(sum, kLanes), p), part);
}

// Any width and alignment, element by element; reads a row twice.
template <typename Row>
__global__ void __launch_bounds__(kAnyWidthThreads) rms_norm_any_kernel(const __grid_constant__ RmsNormParams p) {
  using X = typename Row::X;
  using R = typename Row::R;
  using T = typename Row::T;
  __shared__ float warp_sums[kWarpLanes];
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x;
  const X* x = static_cast<const X*>(p.x) + row * p.x_stride;
  R* residual = p.residual != nullptr ? static_cast<R*>(p.residual) + row * p.residual_stride : nullptr;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kAnyWidthThreads) {
    float value = to_float(x[i]);
    if (residual != nullptr) {
      residual[i] = from_float<R>(value + to_float(residual[i]));
      value = to_float(residual[i]);
    }
    sum = fmaf(value, value, sum);
  }
  const float scale = norm_scale(sum_of_block(sum, warp_sums), p);
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  for (int64_t i = threadIdx.x; i < p.hidden; i += kAnyWidthThreads) {
    const float value = residual != nullptr ? to_float(residual[i]) : to_float(x[i]);
    out[i] = from_float<T>(value * scale * to_float(static_cast<const T*>(p.weight)[i]));
  }
}

template <typename Row>
bool allows_packs(const RmsNormParams& p) {
  constexpr int64_t kCount = Row::kCount;
  constexpr int64_t kXBytes = kCount * sizeof(typename Row::X), kOutBytes = kCount * sizeof(typename Row::T);
  return p.hidden % kCount == 0 && p.x_stride % kCount == 0 && p.out_stride % kCount == 0 &&
         (p.residual == nullptr || (p.residual_stride % kCount == 0 && is_aligned(p.residual, kAccessBytes))) &&
         is_aligned(p.x, kXBytes) && is_aligned(p.out, kOutBytes) && is_aligned(p.weight, kOutBytes);
}

// Threads of a multiprocessor that are given rows at once. Measured: without a residual it pays to keep blocks and read
// ahead, with one there is enough in flight and blocks that end early make room for the next kernel's.
constexpr int64_t kResidentThreads = 1024;

template <typename Row, int kPacks>
int launch_block_rows(const RmsNormParams& p, int64_t num_packs, cudaStream_t stream) {
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  const int64_t threads = divide_up<int64_t>(divide_up<int64_t>(num_packs, kPacks), kWarpLanes) * kWarpLanes;
  const int64_t resident = p.residual != nullptr
                               ? p.num_tokens
                               : limits->num_multiprocessors * std::max<int64_t>(1, kResidentThreads / threads);
  return launch_overlapped("rms_norm", rms_norm_block_kernel<Row, kPacks>,
                           static_cast<unsigned>(std::min(p.num_tokens, resident)), static_cast<unsigned>(threads),
                           stream, p);
}

template <typename Row, int kLanes>
int launch_lanes_per_row(const RmsNormParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(divide_up<int64_t>(p.num_tokens, kWarpRowThreads / kLanes));
  return launch_overlapped("rms_norm", rms_norm_lanes_kernel<Row, kLanes>, blocks, kWarpRowThreads, stream, p);
}

template <typename Row>
int launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  const int64_t num_packs = p.hidden / Row::kCount;
  if (!allows_packs<Row>(p) || num_packs > 8 * kMaxThreads) {
    return launch_overlapped("rms_norm", rms_norm_any_kernel<Row>, static_cast<unsigned>(p.num_tokens),
                             kAnyWidthThreads, stream, p);
  }
  if (num_packs <= kWarpLanes / 2) return launch_lanes_per_row<Row, kWarpLanes / 2>(p, stream);
  if (num_packs <= kWarpLanes) return launch_lanes_per_row<Row, kWarpLanes>(p, stream);
  if (num_packs <= 2 * kMaxThreads) return launch_block_rows<Row, 2>(p, num_packs, stream);
  if (num_packs <= 4 * kMaxThreads) return launch_block_rows<Row, 4>(p, num_packs, stream);
  return launch_block_rows<Row, 8>(p, num_packs, stream);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" int pagemill_cuda_rms_norm(const pagemill::RmsNormParams* params, void* stream) {
  using namespace pagemill;
  const RmsNormParams& p = *params;
  if (p.num_tokens == 0 || p.hidden == 0) return 0;
  if (p.num_tokens > INT32_MAX) {
    return cuda::fail("rms_norm: num_tokens %lld is not supported; supported: up to %d",
                      static_cast<long long>(p.num_tokens), INT32_MAX);
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return cuda::with_element_type(p.dtype, [&](auto element) {
    using T = decltype(element);
    if (p.x_dtype == DType::kFloat32) return cuda::launch_rms_norm<cuda::Row<float, float, T>>(p, cuda_stream);
    if (p.residual != nullptr && p.residual_dtype == DType::kFloat32) {
      return cuda::launch_rms_norm<cuda::Row<T, float, T>>(p, cuda_stream);
    }
    return cuda::launch_rms_norm<cuda::Row<T, T, T>>(p, cuda_stream);
  });
}
