#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacksPerThread = 2;

// 1 / (1 + e^-x), to half a unit in the last place of T or so.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) return 1.0f / (1.0f + expf(-x));
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

// erfc(x / sqrt(2)) / 2 for x >= 0, to 8e-8: Abramowitz and Stegun, 7.1.26. For results of 16 bits.
__device__ __forceinline__ float normal_tail(float x) {
  const float t = __fdividef(1.0f, fmaf(0.3275911f * 0.70710678f, x, 1.0f));
  float p = fmaf(0.5f * 1.061405429f, t, 0.5f * -1.453152027f);
  p = fmaf(p, t, 0.5f * 1.421413741f);
  p = fmaf(p, t, 0.5f * -0.284496736f);
  p = fmaf(p, t, 0.5f * 0.254829592f);
  return p * t * __expf(-0.5f * x * x);
}

template <typename T, Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) return x * sigmoid<T>(x);
  // 0.5 (1 + tanh(u)) is the sigmoid of 2u.
  if constexpr (kActivation == Activation::kGeluTanh) {
    return x * sigmoid<T>(1.5957691216057308f * (x + 0.044715f * x * x * x));
  }
  if constexpr (sizeof(T) == 4) return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  const float tail = normal_tail(fabsf(x));
  return x > 0.0f ? x - x * tail : x * tail;
}

template <typename T, Activation kActivation, int kCount>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(const __grid_constant__ ActivationParams p, uint32_t blocks_per_row) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t block = blockIdx.x - row * blocks_per_row;
  const T* gate = static_cast<const T*>(p.gate_up) + row * p.gate_up_stride;
  const T* up = gate + p.size;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  const int64_t first = (block * kThreads * kPacksPerThread + threadIdx.x) * kCount;
  Pack<T, kCount> gates[kPacksPerThread], ups[kPacksPerThread];
#pragma unroll
  for (int j = 0; j < kPacksPerThread; ++j) {
    const int64_t i = first + j * kThreads * kCount;
    if (i >= p.size) break;
    gates[j] = load_pack<kCount>(gate + i);
    ups[j] = load_pack<kCount>(up + i);
  }
#pragma unroll
  for (int j = 0; j < kPacksPerThread; ++j) {
    const int64_t i = first + j * kThreads * kCount;
    if (i >= p.size) break;
    const Floats<kCount> gate_values = to_floats(gates[j]), up_values = to_floats(ups[j]);
    Floats<kCount> result;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      result.values[e] = activate<T, kActivation>(gate_values.values[e]) * up_values.values[e];
    }
    store_pack(out + i, to_pack<T>(result));
  }
}

template <typename T, Activation kActivation, int kCount>
int launch_activation(const ActivationParams& p, cudaStream_t stream) {
  const int64_t blocks_per_row = divide_up<int64_t>(p.size, kThreads * kPacksPerThread * kCount);
  const int64_t blocks = blocks_per_row * p.num_tokens;
  if (blocks > INT32_MAX) {
    return fail("activation_and_mul: %lld tokens of size %lld are not supported; supported: up to %d blocks",
                static_cast<long long>(p.num_tokens), static_cast<long long>(p.size), INT32_MAX);
  }
  return launch_overlapped("activation_and_mul", activation_kernel<T, kActivation, kCount>,
                           static_cast<unsigned>(blocks), kThreads, stream, p, static_cast<uint32_t>(blocks_per_row));
}

template <typename T, Activation kActivation>
int launch_activation_by_width(const ActivationParams& p, cudaStream_t stream) {
  constexpr int64_t kCount = kPackOf<T>;
  const bool packs = p.size % kCount == 0 && p.out_stride % kCount == 0 && p.gate_up_stride % kCount == 0 &&
                     is_aligned(p.out, kAccessBytes) && is_aligned(p.gate_up, kAccessBytes);
  return packs ? launch_activation<T, kActivation, kCount>(p, stream) : launch_activation<T, kActivation, 1>(p, stream);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" int pagemill_cuda_activation_and_mul(const pagemill::ActivationParams* params, void* stream) {
  using namespace pagemill;
  const ActivationParams& p = *params;
  if (p.num_tokens == 0 || p.size == 0) return 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return cuda::with_element_type(p.dtype, [&](auto element) {
    using T = decltype(element);
    switch (p.activation) {
      case Activation::kSilu:
        return cuda::launch_activation_by_width<T, Activation::kSilu>(p, cuda_stream);
      case Activation::kGeluTanh:
        return cuda::launch_activation_by_width<T, Activation::kGeluTanh>(p, cuda_stream);
      case Activation::kGeluErf:
        break;
    }
    return cuda::launch_activation_by_width<T, Activation::kGeluErf>(p, cuda_stream);
  });
}
