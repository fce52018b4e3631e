// Online softmax on the sums of a warp group's product: a thread holds two rows, of each 2 columns in every 8, and
// shares them with the 3 other threads of its quad. scores[4 i + 2 r + e] is row r, column 8 i + 2 (lane % 4) + e.
#pragma once

#include <cuda_runtime.h>

#include "attention_wgmma_ptx.cuh"
#include "attention_wgmma_traits.cuh"

namespace pagemill::cuda::wgmma {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Of a thread's two rows. The maximum is shared by the quad, the sum is of the thread's own columns.
struct RowState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.0f, 0.0f};
};

// Keys of a key tile that a thread's first row sees, as distances from the key of scores[0]; those of its second row
// lie 8 further on.
struct KeyRange {
  int32_t begin, end;
};

// Scores that are products alone: the scale is folded into the exponent.
struct PlainScores {
  static constexpr bool kIsPlain = true;

  // From a score to units of log2.
  __device__ __forceinline__ static float unit(const KernelParams& params) { return params.scale_log2; }
};

// With soft cap, ALiBi, sinks, a window, or a scale that is not positive. Transformed scores are in units of log2.
struct GeneralScores {
  static constexpr bool kIsPlain = false;

  __device__ __forceinline__ static float unit(const KernelParams&) { return 1.0f; }

  // distance: of the key of scores[0] from the query of the first row.
  template <int kCount>
  __device__ __forceinline__ static void transform(const KernelParams& params, int32_t head, float (&scores)[kCount],
                                                   int32_t distance) {
    const bool is_capped = params.soft_cap != 0.0f;
    const float slope = params.alibi_slopes != nullptr ? params.alibi_slopes[head] * kLog2E : 0.0f;
    const float scale = is_capped ? params.scale * 2.0f * kLog2E / params.soft_cap : params.scale * kLog2E;
    const float cap = params.soft_cap * kLog2E;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float score = scores[i] * scale;
      // tanh(x) = 1 - 2 / (1 + exp(2 x))
      if (is_capped) score = cap - __fdividef(2.0f * cap, 1.0f + exp2_approximate(score));
      const int key = i / 4 * 8 + i % 2, query = i / 2 % 2 * 8;
      scores[i] = fmaf(slope, static_cast<float>(distance + key - query), score);
    }
  }

  // A sink takes part in the sum without a value. Returns what the outputs are to be multiplied with.
  __device__ __forceinline__ static float add_sink(const KernelParams& params, int32_t head, float& maximum,
                                                   float& sum) {
    if (params.sinks == nullptr) return 1.0f;
    const float sink = params.sinks[head] * kLog2E;
    const float new_maximum = fmaxf(maximum, sink);
    if (new_maximum == -INFINITY) return 1.0f;
    const float factor = exp2_approximate(maximum - new_maximum);
    sum = fmaf(sum, factor, exp2_approximate(sink - new_maximum));
    maximum = new_maximum;
    return factor;
  }
};

template <bool kHasWindow, int kCount>
__device__ __forceinline__ void mask(float (&scores)[kCount], KeyRange seen) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int key = i / 4 * 8 + i % 2 - i / 2 % 2 * 8;
    if (key >= seen.end) scores[i] = -INFINITY;
    if constexpr (kHasWindow) {
      if (key < seen.begin) scores[i] = -INFINITY;
    }
  }
}

// Weights exp2(score * unit - subtract) in pairs, as the left factor of the product with V, and their sums by row.
template <typename T, int kCount>
__device__ __forceinline__ void exponentiate(float unit, const float (&scores)[kCount], const RowState& state,
                                             uint32_t (&weights)[kCount / 2], float (&sums)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    // A row that has seen no key keeps weights of 0.
    const float subtract = state.maximum[row] == -INFINITY ? 0.0f : state.maximum[row] * unit;
    float even = 0.0f, odd = 0.0f;
#pragma unroll
    for (int i = 2 * row; i < kCount; i += 4) {
      const float first = exp2_approximate(fmaf(scores[i], unit, -subtract));
      const float second = exp2_approximate(fmaf(scores[i + 1], unit, -subtract));
      even += first;
      odd += second;
      weights[i / 2] = pack<T>(first, second);
    }
    sums[row] = even + odd;
  }
}

// Takes the largest score of this tile as the maximum of those rows that ask for it. correction: what older sums of a
// row are to be multiplied with.
template <int kCount>
__device__ __forceinline__ void raise_maximum(float unit, const float (&scores)[kCount], const bool (&is_asked)[2],
                                              RowState& state, float (&correction)[2]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float even = scores[2 * row], odd = scores[2 * row + 1];
#pragma unroll
    for (int i = 2 * row + 4; i < kCount; i += 4) {
      even = fmaxf(even, scores[i]);
      odd = fmaxf(odd, scores[i + 1]);
    }
    float maximum = fmaxf(even, odd);
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, 2));
    const float old = state.maximum[row];
    maximum = is_asked[row] ? fmaxf(maximum, old) : old;
    // -inf for the first keys of a row, whose older sums are 0.
    correction[row] = maximum == old ? 1.0f : exp2_approximate((old - maximum) * unit);
    state.maximum[row] = maximum;
    state.sum[row] *= correction[row];
  }
}

// Scores become weights. A row keeps the maximum of its first tile until weights relative to it grow large: any maximum
// gives the same result as long as nothing overflows, and the usual tile needs no search for it and leaves the sums so
// far alone. What a row does depends on that row only. Returns whether the sums so far must be corrected.
template <typename T, int kCount>
__device__ __forceinline__ bool weigh(float unit, const float (&scores)[kCount], RowState& state,
                                      uint32_t (&weights)[kCount / 2], float (&correction)[2]) {
  // A sum of a thread's weights below this keeps each of them within float16.
  constexpr float kLargest = 16384.0f;
  bool is_raised = false;
  if (__all_sync(0xffffffff, fmaxf(state.maximum[0], state.maximum[1]) == -INFINITY)) {
    raise_maximum(unit, scores, {true, true}, state, correction);
    is_raised = true;
  }
  float sums[2];
  while (true) {
    exponentiate<T>(unit, scores, state, weights, sums);
    if (is_raised) break;
    bool is_asked[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) is_asked[row] = !(sums[row] <= kLargest) || state.maximum[row] == -INFINITY;
    if (!__any_sync(0xffffffff, is_asked[0] || is_asked[1])) break;
    const uint32_t quad = 0xfu << (threadIdx.x % 32 / 4 * 4);
#pragma unroll
    for (int row = 0; row < 2; ++row) is_asked[row] = (__ballot_sync(0xffffffff, is_asked[row]) & quad) != 0;
    raise_maximum(unit, scores, is_asked, state, correction);
    is_raised = true;
  }
  state.sum[0] += sums[0];
  state.sum[1] += sums[1];
  return is_raised;
}

template <int kCount>
__device__ __forceinline__ void rescale(float (&sums)[kCount], const float (&correction)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] *= correction[i / 2 % 2];
}

}  // namespace pagemill::cuda::wgmma
