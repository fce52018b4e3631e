// The running softmax of one warp's rows, on accumulators of mma.m16n8k16.
//
// A lane holds of each 16 x 8 tile the columns 2 (lane % 4) + {0, 1} of the rows lane / 4 and lane / 4 + 8.
#pragma once

#include <cmath>

#include "attention_mma_ptx.cuh"

namespace pagemill::cuda::mma {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// The largest score (in powers of two) rises by more than this before the sums are scaled down to it: weights reach
// 2^8 then, which every 16-bit type holds, and a common factor of all weights cancels. Each row decides by its own
// scores, so that a row's result does not depend on its neighbours.
constexpr float kMaxRise = 8.0f, kMaxWeight = 256.0f;

// How a product of a query and a key becomes a logit.
struct LogitRule {
  float scale;     // of the product
  float soft_cap;  // 0: none
  float slope;     // of ALiBi; 0: none
};

// 1 - 2 / (e^2x + 1): the error is of the order of float's, unlike that of the tanh instruction.
__device__ inline float tanh_by_exp2(float x) {
  return 1.0f - __fdividef(2.0f, exp2_approx(fminf(2.0f * kLog2E * x, 126.0f)) + 1.0f);
}

template <int kRowTiles, int kColumnTiles>
__device__ inline void apply_rule(float (&scores)[kRowTiles][kColumnTiles][4], const LogitRule& rule,
                                  int first_position, int first_key) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float logit = scores[r][n][c] * rule.scale;
        if (rule.soft_cap != 0.0f) logit = rule.soft_cap * tanh_by_exp2(__fdividef(logit, rule.soft_cap));
        const int position = first_position + r * 16 + (lane >> 2) + (c >> 1) * 8;
        const int key = first_key + n * 8 + (lane & 3) * 2 + (c & 1);
        scores[r][n][c] = fmaf(rule.slope, static_cast<float>(key - position), logit) * kLog2E;
      }
    }
  }
}

// Keys after the row's own, and those that its window has left behind.
template <int kRowTiles, int kColumnTiles>
__device__ inline void hide_unseen(float (&scores)[kRowTiles][kColumnTiles][4], int32_t window, int first_position,
                                   int first_key) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Relative to the lane's first column, so that the comparisons are with constants.
      const int last = first_position + r * 16 + (lane >> 2) + half * 8 - first_key - (lane & 3) * 2;
      const int before = window >= 0 ? last - window : -1;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = n * 8 + c;
          if (column > last || column <= before) scores[r][n][half * 2 + c] = -INFINITY;
        }
      }
    }
  }
}

template <int kRowTiles>
struct RowState {
  // Whether weights relative to the references as they are sum up to so little that none is above 2^kMaxRise. A row
  // that has seen no key gives inf or NaN here.
  __device__ static bool keeps_references(const float (&sums)[kRowTiles][2]) {
    bool keeps = true;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) keeps = keeps && sums[r][half] <= kMaxWeight;
    }
    return keeps;
  }

  __device__ void add(const float (&sums)[kRowTiles][2]) {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[r][half] += sums[r][half];
    }
  }

  float reference[kRowTiles][2];  // what the exponents are relative to, in powers of two; -inf before the first key
  float sum[kRowTiles][2];        // of the weights of this lane's columns

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) reference[r][half] = -INFINITY, sum[r][half] = 0.0f;
    }
  }
};

// Moves the references where the tile's scores ask for it, and scales the sums accordingly. What outputs must be scaled
// by goes to `factors`; false where that is 1 for this lane's rows.
template <int kRowTiles, int kColumnTiles>
__device__ inline bool move_references(const float (&scores)[kRowTiles][kColumnTiles][4], float multiplier,
                                       RowState<kRowTiles>& state, float (&factors)[kRowTiles][2]) {
  bool moves = false;
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = fmaxf(scores[r][0][half * 2], scores[r][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kColumnTiles; ++n) {
        largest = fmaxf(largest, fmaxf(scores[r][n][half * 2], scores[r][n][half * 2 + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)) * multiplier;
      factors[r][half] = 1.0f;
      if (largest > state.reference[r][half] + kMaxRise) {
        factors[r][half] = exp2_approx(state.reference[r][half] - largest);
        state.reference[r][half] = largest;
        moves = true;
      }
      state.sum[r][half] *= factors[r][half];
    }
  }
  return moves;
}

template <int kRowTiles, int kOutTiles>
__device__ inline void scale_rows(const float (&factors)[kRowTiles][2], float (&out)[kRowTiles][kOutTiles][4]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out[r][n][c] *= factors[r][c >> 1];
    }
  }
}

// Scores become weights: powers of two of score * multiplier - reference. Their sums go to `sums`.
template <int kRowTiles, int kColumnTiles>
__device__ inline void weigh(float (&scores)[kRowTiles][kColumnTiles][4], float multiplier,
                             const float (&references)[kRowTiles][2], float (&sums)[kRowTiles][2]) {
#pragma unroll
  for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[r][half] = 0.0f;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[r][n][half * 2 + c];
          score = exp2_approx(fmaf(score, multiplier, -references[r][half]));
          sums[r][half] += score;
        }
      }
    }
  }
}

}  // namespace pagemill::cuda::mma
