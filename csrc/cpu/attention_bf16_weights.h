// From scores to weights, for attention on bfloat16 products: a row of 128 keys at a time.
#pragma once

#include "attention_bf16_scratch.h"

namespace pagemill {
namespace {

// soft_cap, ALiBi, and a scale that is not positive: brings scores to units of log2.
template <typename Tile>
PAGEMILL_INLINE void adjust_scores(const Tile& tile, int row, int32_t first_key, __m512 (&x)[kKeyTiles]) {
  const VecF scale = set1(tile.p.scale * tile.key_scale), cap = set1(tile.p.soft_cap);
  const VecF inverse = set1(tile.p.soft_cap != 0.0f ? 1.0f / tile.p.soft_cap : 0.0f);
  const VecF slope = set1(tile.p.alibi_slopes != nullptr ? tile.p.alibi_slopes[tile.query_head(row)] * kLog2E : 0.0f);
  const __m512 lanes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int i = 0; i < kKeyTiles; ++i) {
    VecF score = VecF{x[i]} * scale;
    if (tile.p.soft_cap != 0.0f) score = tanh(score * inverse) * cap;
    const VecF distance{
        _mm512_add_ps(lanes, _mm512_set1_ps(static_cast<float>(first_key + i * 16 - tile.position(row))))};
    x[i] = fma(slope, distance, score * set1(kLog2E)).v;
  }
}

PAGEMILL_INLINE void mask_scores(int32_t begin, int32_t end, __m512 (&x)[kKeyTiles]) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512 none = _mm512_set1_ps(-__builtin_inff());
  for (int i = 0; i < kKeyTiles; ++i) {
    const __m512i key = _mm512_add_epi32(lanes, _mm512_set1_epi32(i * 16));
    const __mmask16 seen = _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(end));
    x[i] = _mm512_mask_mov_ps(none, _mm512_mask_cmpge_epi32_mask(seen, key, _mm512_set1_epi32(begin)), x[i]);
  }
}

// Leaves in place the scores of the keys that a row sees, in units of log2 where `factor` does not bring them there.
template <typename Tile>
PAGEMILL_INLINE void finish_scores(const Tile& tile, int row, int32_t first_key, float* scores) {
  const int32_t end = tile.position(row) + 1 - first_key;
  const int32_t begin = tile.p.window >= 0 ? end - tile.p.window : 0;
  const bool sees_all = end >= kKeyBlock && begin <= 0;
  if (tile.plain && sees_all) return;
  __m512 x[kKeyTiles];
  for (int i = 0; i < kKeyTiles; ++i) x[i] = _mm512_load_ps(scores + i * 16);
  if (!tile.plain) adjust_scores(tile, row, first_key, x);
  if (!sees_all) mask_scores(begin, end, x);
  for (int i = 0; i < kKeyTiles; ++i) _mm512_store_ps(scores + i * 16, x[i]);
}

// The largest score in units of log2, in every lane.
PAGEMILL_INLINE __m512 largest_score(const float* scores, float factor) {
  __m512 m[2] = {_mm512_load_ps(scores), _mm512_load_ps(scores + 16)};
  for (int i = 2; i < kKeyTiles; ++i) m[i % 2] = _mm512_max_ps(m[i % 2], _mm512_load_ps(scores + i * 16));
  return _mm512_mul_ps(broadcast_max(_mm512_max_ps(m[0], m[1])), _mm512_set1_ps(factor));
}

// Weights are powers of two of scores above a reference. Returns their sum by lanes.
PAGEMILL_INLINE __m512 weights_of(const float* scores, float factor, __m512 reference, __m512 (&weights)[kKeyTiles]) {
  const __m512 scale = _mm512_set1_ps(factor);
  for (int i = 0; i < kKeyTiles; ++i) {
    weights[i] = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + i * 16), scale, reference));
  }
  const __m512* w = weights;
  const __m512 low = _mm512_add_ps(_mm512_add_ps(w[0], w[1]), _mm512_add_ps(w[2], w[3]));
  const __m512 high = _mm512_add_ps(_mm512_add_ps(w[4], w[5]), _mm512_add_ps(w[6], w[7]));
  return _mm512_add_ps(low, high);
}

// A larger reference, with what the row has summed so far brought in line.
template <typename RowGroup>
__attribute__((noinline)) __m512 raise_reference(RowGroup& g, int local, const float* scores, float factor) {
  const __m512 old_reference = _mm512_set1_ps(g.reference[local]);
  const __m512 reference = _mm512_max_ps(largest_score(scores, factor), old_reference);
  const __m512 ratio = exp2(VecF{_mm512_sub_ps(old_reference, reference)}).v;
  g.reference[local] = _mm512_cvtss_f32(reference);
  _mm512_store_ps(g.sums[local], _mm512_mul_ps(_mm512_load_ps(g.sums[local]), ratio));
  for (int d = 0; g.started && d < RowGroup::kPaddedSize; d += 16) {
    _mm512_store_ps(g.out[local] + d, _mm512_mul_ps(_mm512_load_ps(g.out[local] + d), ratio));
  }
  return reference;
}

// Scores of a group's rows to weights, with their sums brought up to date. A row's reference is the largest score of
// the first block that it sees, and is raised only where weights would grow so large that digits were lost: that is
// rare, and spares most blocks the search for the largest. Each loop is over all rows, since a row's way from scores
// to weights is long and tile instructions leave little room to work on several rows at a time.
template <typename Tile>
PAGEMILL_INLINE void weigh_rows(Tile& tile, int group_index, int32_t first_key) {
  auto& g = tile.s.groups[group_index];
  auto& w = tile.s.weights;
  const int num_rows = tile.rows_of(group_index);
  const float factor = tile.factor;
  for (int i = 0; i < num_rows; ++i) finish_scores(tile, group_index * kGroupRows + i, first_key, w.scores[i]);
  for (int i = 0; i < num_rows; ++i) {
    if (g.reference[i] != kNoMaximum) continue;
    g.reference[i] = _mm512_cvtss_f32(_mm512_max_ps(largest_score(w.scores[i], factor), _mm512_set1_ps(kNoMaximum)));
  }
  for (int i = 0; i < num_rows; ++i) {
    __m512 weights[kKeyTiles];
    __m512 sum = weights_of(w.scores[i], factor, _mm512_set1_ps(g.reference[i]), weights);
    if (_mm512_cmp_ps_mask(sum, _mm512_set1_ps(kMostWeight), _CMP_GT_OQ) != 0) [[unlikely]] {
      sum = weights_of(w.scores[i], factor, raise_reference(g, i, w.scores[i], factor), weights);
    }
    for (int j = 0; j < kSubBlocks; ++j) {
      const __m512bh both = _mm512_cvtne2ps_pbh(weights[2 * j + 1], weights[2 * j]);
      _mm512_store_si512(w.row(i) + j * kSubKeys, reinterpret_cast<__m512i>(both));
    }
    _mm512_store_ps(g.sums[i], _mm512_add_ps(_mm512_load_ps(g.sums[i]), sum));
  }
}

}  // namespace
}  // namespace pagemill
