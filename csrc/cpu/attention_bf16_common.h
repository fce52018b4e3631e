// Layouts, sizes and vector helpers of attention on bfloat16 products.
#pragma once

#include <immintrin.h>

#include "attention_impl.h"
#include "kv_format.h"

namespace pagemill {
namespace {

constexpr int kKeyBlock = 128;  // between two looks at the maximum
constexpr int kSubKeys = 32;    // the depth of one product
constexpr int kSubBlocks = kKeyBlock / kSubKeys;
constexpr int kKeyTiles = kKeyBlock / 16;
constexpr int kGroupRows = 16;
// Of a task. The more rows, the less it costs to bring keys and values into pair layout; all must stay in the second
// cache.
template <int kHeadSize>
constexpr int kMaxGroups = kHeadSize <= 128 ? 32 : 16;
static_assert(kPartitionKeys % kKeyBlock == 0);
// Largest sum of eight weights that a row's reference is kept for: a power of two far below what float32 holds, while
// weights of 1 and less still have all their digits.
constexpr float kMostWeight = 0x1p20f;

// 2^x for a weight that is rounded to bfloat16: relative error below 1e-4, exact for whole x. With results below 2^-126
// flushed to zero (FlushSubnormals): masked scores would produce them in every block.
PAGEMILL_INLINE __m512 exp2_short(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 1);  // x - floor(x)
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.07706705480813980f), f, _mm512_set1_ps(0.22764497995376587f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.69511681795120240f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, x);  // floors x itself
}

// Subnormal numbers cost a hundred cycles each; bfloat16 products take them for zero anyway.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  unsigned saved_;
};

PAGEMILL_INLINE void transpose_16x16(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// The largest lane, in every lane.
PAGEMILL_INLINE __m512 broadcast_max(__m512 m) {
  m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0x4e));
  m = _mm512_max_ps(m, _mm512_shuffle_f32x4(m, m, 0xb1));
  m = _mm512_max_ps(m, _mm512_permute_ps(m, 0x4e));
  return _mm512_max_ps(m, _mm512_permute_ps(m, 0xb1));
}

// What a policy works on: the operands of one group of rows and of one block of keys.
template <int kHeadSize>
struct Bf16Shape {
  static constexpr int kChunks = (kHeadSize + 31) / 32;  // of dims, the last filled up with zeros
  static constexpr int kPaddedSize = kChunks * 32;
  static constexpr __mmask32 kLastMask = static_cast<__mmask32>(0xffffffffu >> (kPaddedSize - kHeadSize));

  struct RowGroup {
    static constexpr int kPaddedSize = Bf16Shape::kPaddedSize;
    alignas(64) uint16_t query[kChunks][16][32];
    alignas(64) float out[kGroupRows][kPaddedSize];  // of this partition; in 32 dims the order of prepare_values
    alignas(64) float sums[kGroupRows][16];
    alignas(64) float reference[kGroupRows];  // what scores are reduced by before they become powers of two
    bool started;                             // in this partition: out holds numbers

    PAGEMILL_INLINE void clear() {
      started = false;
      for (int row = 0; row < kGroupRows; ++row) {
        reference[row] = kNoMaximum;
        _mm512_store_ps(sums[row], _mm512_setzero_ps());
      }
    }
  };
  struct KeyBlock {
    alignas(64) uint16_t keys[kKeyTiles][kChunks][16][32];
    alignas(64) uint16_t values[kSubBlocks][2 * kChunks][16][32];
  };
  // Of one group and block. A row's weights take the place of its scores, so that all stays in the first cache.
  struct Weights {
    alignas(64) float scores[kGroupRows][kKeyBlock];

    static constexpr int kRowStride = 2 * kKeyBlock;  // of weights, in numbers
    PAGEMILL_INLINE uint16_t* row(int row) { return reinterpret_cast<uint16_t*>(scores[row]); }
    PAGEMILL_INLINE const uint16_t* row(int row) const { return reinterpret_cast<const uint16_t*>(scores[row]); }
  };
};

// Sixteen keys as the rows of a tile.
struct KeyTile {
  const void* rows;
  long stride_bytes;
};

// Of one row in partial results: its sums over values, then maximum and sum of weights.
template <int kHeadSize>
constexpr int64_t kPartialRowFloats = Bf16Shape<kHeadSize>::kPaddedSize + 16;

}  // namespace
}  // namespace pagemill
