// What a task of attention on bfloat16 products works in, with the sums of all its partitions so far.
#pragma once

#include "attention_bf16_common.h"

namespace pagemill {
namespace {

// One partition's results of up to one group of rows.
struct PartialRows {
  const float* out;
  int64_t row_stride;
  alignas(64) float reference[kGroupRows] = {};
  alignas(64) float sum[kGroupRows] = {};
};

template <int kHeadSize, int kMaxRows>
struct Bf16Totals {
  static constexpr int kPaddedSize = Bf16Shape<kHeadSize>::kPaddedSize;
  static_assert(kGroupRows == W);

  alignas(64) float maximum[kMaxRows];
  alignas(64) float sum[kMaxRows];
  alignas(64) float out[kMaxRows][kPaddedSize];

  void clear(int num_rows) {
    for (int row = 0; row < num_rows; row += W) {
      store(maximum + row, set1(kNoMaximum));
      store(sum + row, zero());
    }
    for (int row = 0; row < num_rows; ++row) {
      for (int d = 0; d < kPaddedSize; d += W) store(out[row] + d, zero());
    }
  }

  PAGEMILL_INLINE void fold(int first_row, int num_rows, const PartialRows& part) {
    const VecF old_max = load(maximum + first_row), reference = load(part.reference);
    const VecF new_max = max(old_max, reference);
    const VecF old_scale = exp2(old_max - new_max), part_scale = exp2(reference - new_max);
    alignas(64) float old_scales[kGroupRows], part_scales[kGroupRows];
    store(old_scales, old_scale);
    store(part_scales, part_scale);
    store(maximum + first_row, new_max);
    store(sum + first_row, fma(load(part.sum), part_scale, load(sum + first_row) * old_scale));
    for (int i = 0; i < num_rows; ++i) {
      float* total = out[first_row + i];
      const float* added = part.out + i * part.row_stride;
      for (int d = 0; d < kPaddedSize; d += W) {
        store(total + d, fma(load(added + d), set1(part_scales[i]), load(total + d) * set1(old_scales[i])));
      }
    }
  }

  // One row in bfloat16; 32 dims are held in the order of Bf16AttentionTile::prepare_values.
  PAGEMILL_INLINE void write_row(int row, float scale, BFloat16* to) const {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    for (int d = 0; d < kHeadSize; d += 32) {
      const __m512 low = (load(out[row] + d) * set1(scale)).v, high = (load(out[row] + d + 16) * set1(scale)).v;
      store(to + d, VecF{_mm512_permutex2var_ps(low, first, high)});
      if (kHeadSize - d > 16) store(to + d + 16, VecF{_mm512_permutex2var_ps(low, second, high)});
    }
  }
};

template <int kHeadSize>
struct Bf16Scratch {
  using Shape = Bf16Shape<kHeadSize>;
  static constexpr int kMaxRows = kMaxGroups<kHeadSize> * kGroupRows;
  typename Shape::KeyBlock block;
  typename Shape::Weights weights;
  alignas(64) uint16_t zeros[Shape::kPaddedSize];
  alignas(64) uint16_t query_pairs[Shape::kChunks][16][32];  // Q^T of a task of few rows
  // Small tasks touch the first rows only.
  typename Shape::RowGroup groups[kMaxGroups<kHeadSize>];
  Bf16Totals<kHeadSize, kMaxRows> totals;
};

}  // namespace
}  // namespace pagemill
