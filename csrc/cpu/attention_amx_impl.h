// Attention on AMX tiles for bfloat16 caches. Include from a file compiled with AMX.
//
// Scores are computed as K Q^T, so key tiles load straight from the cache: S^T[key][row] = K[key][dim] Q^T[dim][row].
// Values are accumulated as O^T[dim][row] = V^T[dim][key] P^T[key][row]: P^T in pair layout falls out of S^T without
// moving a lane, and V^T is made once for all rows of a tile. Everything else is as in attention_impl.h.
#pragma once

#include <immintrin.h>

#include "attention_impl.h"

namespace pagemill {
namespace {

constexpr int kAmxBlockKeys = 128;  // between two rescalings of the values
constexpr int kSubKeys = 32;        // of one V^T tile
constexpr int kSubBlocks = kAmxBlockKeys / kSubKeys;
constexpr int kMaxAmxVectors = 4;
static_assert(kPartitionKeys % kAmxBlockKeys == 0);

// GCC's tile loads do not say that they read memory: stores before them must be finished explicitly.
PAGEMILL_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles are per-thread state that a kernel must leave clean.
class TileSession {
 public:
  TileSession() {
    static constexpr TileConfig kConfig{};
    _tile_loadconfig(&kConfig);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;
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

// 2^x for a weight that is rounded to bfloat16: relative error below 5e-5, exact at 0, and 0 below 2^-126 (see exp2).
PAGEMILL_INLINE __m512 exp2_short(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  x = _mm512_maskz_mov_ps(normal, x);
  const __m512 whole = _mm512_roundscale_ps(x, 8);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.6181291e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, p, whole);
}

template <int kHeadSize, int kRows>
struct AmxScratch {
  alignas(64) uint16_t query[kRows / 16][kHeadSize / 32][16][32];   // Q^T in pairs of dims
  alignas(64) uint16_t weights[kRows / 16][kSubBlocks][16][32];     // P^T in pairs of keys
  alignas(64) uint16_t values[kHeadSize / 16][kSubBlocks][16][32];  // V^T, dims in the order of transpose_values
  alignas(64) uint16_t keys[kSubKeys][kHeadSize];                   // where a tile's keys are not one run of memory
  alignas(64) float scores[kAmxBlockKeys][kRows];
  alignas(64) float part[2 + kHeadSize][kRows];
  alignas(64) float total[2 + kHeadSize][kRows];
  alignas(64) float first_key[kRows];
  alignas(64) float end_key[kRows];
  alignas(64) float position[kRows];
  alignas(64) float slope[kRows];
};

template <int kHeadSize, int kVectors>
struct AmxAttentionTile {
  static constexpr int kRows = kVectors * 16;
  static constexpr int kDimChunks = kHeadSize / 32;
  static constexpr long kRowBytes = kRows * 4;
  static constexpr long kCacheRowBytes = kHeadSize * 2;
  using Scratch = AmxScratch<kHeadSize, kRows>;

  const PagedAttentionParams& p;
  const AttentionTask& task;
  Scratch& s;
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  const SequenceView seq = sequence_view(p, task.seq);
  // Scores are multiplied by this to be in units of log2; 1 where a pass over the scores has done it already.
  const bool plain = p.soft_cap == 0.0f && p.alibi_slopes == nullptr && p.scale > 0.0f;
  const float factor = plain ? p.scale * kLog2E : 1.0f;

  PAGEMILL_INLINE int32_t query_head(int row) const { return task.kv_head * group + (task.first_row + row) % group; }
  PAGEMILL_INLINE int32_t token(int row) const { return (task.first_row + row) / group; }

  void load_queries() {
    for (int row = 0; row < kRows; ++row) {
      const bool used = row < task.num_rows;
      const int32_t position = used ? seq.first_position + token(row) : 0;
      s.position[row] = static_cast<float>(position);
      s.end_key[row] = used ? static_cast<float>(position + 1) : 0.0f;
      s.first_key[row] = p.window >= 0 ? static_cast<float>(position - p.window + 1) : 0.0f;
      s.slope[row] = used && p.alibi_slopes != nullptr ? p.alibi_slopes[query_head(row)] * kLog2E : 0.0f;
    }
    for (int v = 0; v < kVectors; ++v) {
      for (int chunk = 0; chunk < kDimChunks; ++chunk) {
        __m512i r[16];
        for (int i = 0; i < 16; ++i) {
          const int row = v * 16 + i;
          r[i] = _mm512_setzero_si512();
          if (row >= task.num_rows) continue;
          const auto* q = static_cast<const uint16_t*>(p.query) +
                          (seq.first_token + token(row)) * p.query_token_stride + query_head(row) * p.query_head_stride;
          r[i] = _mm512_loadu_si512(q + chunk * 32);
        }
        transpose_16x16(r);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(s.query[v][chunk][i], r[i]);
      }
    }
  }

  // Sixteen key vectors from `first` on, one run of memory.
  const void* key_tile(int32_t first, int32_t begin, int32_t end, int half) {
    if (first >= end || first + 16 <= begin) return s.keys;  // all masked: any numbers do
    if (p.block_size >= 16) return cache_row<uint16_t>(p, p.key_cache, seq, task.kv_head, first);
    uint16_t (*target)[kHeadSize] = s.keys + half * 16;
    for (int i = 0; i < 16; ++i) {
      const int32_t key = first + i < begin ? begin : first + i < end ? first + i : end - 1;
      __builtin_memcpy(target[i], cache_row<uint16_t>(p, p.key_cache, seq, task.kv_head, key), kCacheRowBytes);
    }
    finish_stores();
    return target;
  }

  PAGEMILL_INLINE void score_sub_block(int32_t first, int32_t begin, int32_t end, int sub) {
    const auto* k0 = static_cast<const uint16_t*>(key_tile(first, begin, end, 0));
    const auto* k1 = static_cast<const uint16_t*>(key_tile(first + 16, begin, end, 1));
    float (*scores)[kRows] = s.scores + sub * kSubKeys;
    if constexpr (kVectors == 1) {
      _tile_zero(0);
      _tile_zero(1);
      for (int c = 0; c < kDimChunks; ++c) {
        _tile_loadd(2, k0 + c * 32, kCacheRowBytes);
        _tile_loadd(3, k1 + c * 32, kCacheRowBytes);
        _tile_loadd(4, s.query[0][c], 64);
        _tile_dpbf16ps(0, 2, 4);
        _tile_dpbf16ps(1, 3, 4);
      }
      _tile_stored(0, scores[0], kRowBytes);
      _tile_stored(1, scores[16], kRowBytes);
    } else {
      for (int v = 0; v < kVectors; v += 2) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int c = 0; c < kDimChunks; ++c) {
          _tile_loadd(4, k0 + c * 32, kCacheRowBytes);
          _tile_loadd(5, k1 + c * 32, kCacheRowBytes);
          _tile_loadd(6, s.query[v][c], 64);
          _tile_loadd(7, s.query[v + 1][c], 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, scores[0] + v * 16, kRowBytes);
        _tile_stored(1, scores[0] + v * 16 + 16, kRowBytes);
        _tile_stored(2, scores[16] + v * 16, kRowBytes);
        _tile_stored(3, scores[16] + v * 16 + 16, kRowBytes);
      }
    }
  }

  // Row i of tile 2 t is dim 32 t + 8 (i / 4) + i % 4, and of tile 2 t + 1 that plus 4: the order in which unpacking
  // leaves them, undone when the output is written.
  PAGEMILL_INLINE void transpose_values(int32_t first, int32_t begin, int32_t end, int sub) {
    const uint16_t* rows[kSubKeys];
    const int32_t step = p.block_size < kSubKeys ? p.block_size : kSubKeys;
    for (int32_t i = 0; i < kSubKeys; i += step) {
      if (first + i >= end || first + i + step <= begin) {
        for (int32_t j = i; j < i + step; ++j) rows[j] = nullptr;
        continue;
      }
      const uint16_t* base = cache_row<uint16_t>(p, p.value_cache, seq, task.kv_head, first + i);
      // Slots past the end may hold anything; a weight of zero does not cancel a NaN.
      for (int32_t j = i; j < i + step; ++j) rows[j] = first + j < end ? base + (j - i) * kHeadSize : nullptr;
    }
    for (int t = 0; t < kDimChunks; ++t) {
      __m512i low[16], high[16];
      for (int pair = 0; pair < 16; ++pair) {
        const uint16_t *even = rows[2 * pair], *odd = rows[2 * pair + 1];
        const __m512i a = even != nullptr ? _mm512_loadu_si512(even + t * 32) : _mm512_setzero_si512();
        const __m512i b = odd != nullptr ? _mm512_loadu_si512(odd + t * 32) : _mm512_setzero_si512();
        low[pair] = _mm512_unpacklo_epi16(a, b);
        high[pair] = _mm512_unpackhi_epi16(a, b);
      }
      transpose_16x16(low);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(s.values[2 * t][sub][i], low[i]);
      transpose_16x16(high);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(s.values[2 * t + 1][sub][i], high[i]);
    }
  }

  // soft_cap, ALiBi, and a scale that is not positive: brings the scores to units of log2.
  void adjust_scores(int32_t first, int num_keys) {
    const VecF scale = set1(p.scale), cap = set1(p.soft_cap);
    const VecF inverse = set1(p.soft_cap != 0.0f ? 1.0f / p.soft_cap : 0.0f);
    for (int i = 0; i < num_keys; ++i) {
      const VecF key = set1(static_cast<float>(first + i));
      for (int r = 0; r < kRows; r += 16) {
        VecF score = load(s.scores[i] + r) * scale;
        if (p.soft_cap != 0.0f) score = tanh(score * inverse) * cap;
        score = fma(load(s.slope + r), key - load(s.position + r), score * set1(kLog2E));
        store(s.scores[i] + r, score);
      }
    }
  }

  void mask_scores(int32_t first, int num_keys) {
    const VecF none = set1(-__builtin_inff());
    for (int r = 0; r < kRows; r += 16) {
      const VecF end_key = load(s.end_key + r), first_key = load(s.first_key + r);
      for (int i = 0; i < num_keys; ++i) {
        const VecF key = set1(static_cast<float>(first + i));
        VecF score = select_less(key, end_key, load(s.scores[i] + r), none);
        store(s.scores[i] + r, select_less(key, first_key, none, score));
      }
    }
  }

  PAGEMILL_INLINE void weigh_block(int num_keys) {
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512 scale = _mm512_set1_ps(factor);
    for (int v = 0; v < kVectors; ++v) {
      const float* scores = s.scores[0] + v * 16;
      __m512 m0 = _mm512_set1_ps(-__builtin_inff()), m1 = m0, m2 = m0, m3 = m0;
      for (int i = 0; i < num_keys; i += 4) {
        m0 = _mm512_max_ps(m0, _mm512_load_ps(scores + (i + 0) * kRows));
        m1 = _mm512_max_ps(m1, _mm512_load_ps(scores + (i + 1) * kRows));
        m2 = _mm512_max_ps(m2, _mm512_load_ps(scores + (i + 2) * kRows));
        m3 = _mm512_max_ps(m3, _mm512_load_ps(scores + (i + 3) * kRows));
      }
      m0 = _mm512_mul_ps(_mm512_max_ps(_mm512_max_ps(m0, m1), _mm512_max_ps(m2, m3)), scale);
      const VecF old_max = load(s.part[0] + v * 16);
      const VecF new_max{_mm512_max_ps(m0, old_max.v)};
      const VecF old_scale = exp2(old_max - new_max);
      __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
      for (int i = 0; i < num_keys; i += 2) {
        const __m512 even = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + i * kRows), scale, new_max.v));
        const __m512 odd = exp2_short(_mm512_fmsub_ps(_mm512_load_ps(scores + (i + 1) * kRows), scale, new_max.v));
        sum0 = _mm512_add_ps(sum0, even);
        sum1 = _mm512_add_ps(sum1, odd);
        const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
        _mm512_store_si512(s.weights[v][i / kSubKeys][i % kSubKeys / 2], _mm512_permutexvar_epi16(pairs, both));
      }
      store(s.part[0] + v * 16, new_max);
      store(s.part[1] + v * 16, fma(load(s.part[1] + v * 16), old_scale, VecF{_mm512_add_ps(sum0, sum1)}));
      // Most blocks raise no maximum once the first few keys are seen.
      if (!any_greater(new_max, old_max)) continue;
      for (int d = 2; d < 2 + kHeadSize; ++d) store(s.part[d] + v * 16, load(s.part[d] + v * 16) * old_scale);
    }
  }

  PAGEMILL_INLINE void add_values(int first_sub, int end_sub) {
    finish_stores();
    for (int g = 0; g < kHeadSize / 16; g += 2) {
      float (*o0)[kRows] = s.part + 2 + g * 16;
      float (*o1)[kRows] = o0 + 16;
      if constexpr (kVectors == 1) {
        _tile_loadd(0, o0[0], kRowBytes);
        _tile_loadd(1, o1[0], kRowBytes);
        for (int sub = first_sub; sub < end_sub; ++sub) {
          _tile_loadd(2, s.values[g][sub], 64);
          _tile_loadd(3, s.values[g + 1][sub], 64);
          _tile_loadd(4, s.weights[0][sub], 64);
          _tile_dpbf16ps(0, 2, 4);
          _tile_dpbf16ps(1, 3, 4);
        }
        _tile_stored(0, o0[0], kRowBytes);
        _tile_stored(1, o1[0], kRowBytes);
      } else {
        for (int v = 0; v < kVectors; v += 2) {
          _tile_loadd(0, o0[0] + v * 16, kRowBytes);
          _tile_loadd(1, o0[0] + v * 16 + 16, kRowBytes);
          _tile_loadd(2, o1[0] + v * 16, kRowBytes);
          _tile_loadd(3, o1[0] + v * 16 + 16, kRowBytes);
          for (int sub = first_sub; sub < end_sub; ++sub) {
            _tile_loadd(4, s.values[g][sub], 64);
            _tile_loadd(5, s.values[g + 1][sub], 64);
            _tile_loadd(6, s.weights[v][sub], 64);
            _tile_loadd(7, s.weights[v + 1][sub], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
          }
          _tile_stored(0, o0[0] + v * 16, kRowBytes);
          _tile_stored(1, o0[0] + v * 16 + 16, kRowBytes);
          _tile_stored(2, o1[0] + v * 16, kRowBytes);
          _tile_stored(3, o1[0] + v * 16 + 16, kRowBytes);
        }
      }
    }
  }

  // Pages lie anywhere in memory, so the hardware cannot guess the next ones.
  PAGEMILL_INLINE void prefetch_sub_block(int32_t first, int32_t end) {
    for (int32_t key = first; key < first + kSubKeys && key < end; key += 16) {
      const int32_t lines = (p.block_size < 16 ? p.block_size : 16) * kHeadSize * 2 / 64;
      const auto* k = reinterpret_cast<const char*>(cache_row<uint16_t>(p, p.key_cache, seq, task.kv_head, key));
      const auto* v = reinterpret_cast<const char*>(cache_row<uint16_t>(p, p.value_cache, seq, task.kv_head, key));
      for (int32_t i = 0; i < lines; ++i) {
        _mm_prefetch(k + i * 64, _MM_HINT_T0);
        _mm_prefetch(v + i * 64, _MM_HINT_T0);
      }
    }
  }

  void run_partition(int32_t partition, KeyRange range) {
    clear_partition<kRows>(s.part, kHeadSize);
    const int32_t partition_first = partition * kPartitionKeys;
    const int32_t end = partition_first + kPartitionKeys < range.end ? partition_first + kPartitionKeys : range.end;
    const int32_t all_end = task.num_rows == kRows ? seq.first_position + token(0) + 1 : 0;
    const int32_t all_begin = p.window >= 0 ? seq.first_position + token(task.num_rows - 1) - p.window + 1 : 0;
    for (int32_t block = partition_first; block < end; block += kAmxBlockKeys) {
      if (block + kAmxBlockKeys <= range.begin) continue;
      const int num_subs = (end - block < kAmxBlockKeys ? end - block + kSubKeys - 1 : kAmxBlockKeys) / kSubKeys;
      for (int sub = 0; sub < num_subs; ++sub) {
        const int32_t first = block + sub * kSubKeys;
        // Behind the window pages may have been given back: nothing there is read, and the mask hides the scores.
        if (first + kSubKeys <= range.begin) {
          for (int g = 0; g < kHeadSize / 16; ++g) __builtin_memset(s.values[g][sub], 0, sizeof(s.values[g][sub]));
          continue;
        }
        prefetch_sub_block(first + kSubKeys, end);
        score_sub_block(first, range.begin, end, sub);
        transpose_values(first, range.begin, end, sub);
      }
      const int num_keys = num_subs * kSubKeys;
      if (!plain) adjust_scores(block, num_keys);
      if (block + num_keys > all_end || block < all_begin) mask_scores(block, num_keys);
      weigh_block(num_keys);
      add_values(0, num_subs);
    }
  }

  void write_row(const __m512& low, const __m512& high, uint16_t* out) {
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    store(reinterpret_cast<BFloat16*>(out), VecF{_mm512_permutex2var_ps(low, first, high)});
    store(reinterpret_cast<BFloat16*>(out) + 16, VecF{_mm512_permutex2var_ps(low, second, high)});
  }

  void write_output() {
    alignas(64) float inverse[kRows];
    for (int row = 0; row < kRows; ++row) {
      inverse[row] = 0.0f;
      if (row >= task.num_rows) continue;
      const int32_t head = query_head(row);
      float maximum = s.total[0][row], sum = s.total[1][row], scale = 1.0f;
      if (p.sinks != nullptr) {
        const float sink = p.sinks[head] * kLog2E;
        const float new_max = sink > maximum ? sink : maximum;
        scale = ::exp2f(maximum - new_max);
        sum = sum * scale + ::exp2f(sink - new_max);
        maximum = new_max;
      }
      inverse[row] = sum > 0.0f ? scale / sum : 0.0f;
      if (p.lse != nullptr) {
        p.lse[int64_t{seq.first_token + token(row)} * p.num_query_heads + head] = (maximum + ::log2f(sum)) * kLn2;
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const __m512 scale = _mm512_load_ps(inverse + v * 16);
      for (int t = 0; t < kDimChunks; ++t) {
        __m512i low[16], high[16];
        for (int i = 0; i < 16; ++i) {
          low[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(s.total[2 + t * 32 + i] + v * 16), scale));
          high[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(s.total[2 + t * 32 + 16 + i] + v * 16), scale));
        }
        transpose_16x16(low);
        transpose_16x16(high);
        for (int i = 0; i < 16 && v * 16 + i < task.num_rows; ++i) {
          const int row = v * 16 + i;
          auto* out = static_cast<uint16_t*>(p.out) + (seq.first_token + token(row)) * p.out_token_stride +
                      query_head(row) * p.out_head_stride;
          write_row(_mm512_castsi512_ps(low[i]), _mm512_castsi512_ps(high[i]), out + t * 32);
        }
      }
    }
  }

  void run(float* partials, int64_t partial_floats) {
    const TileSession session;
    const KeyRange range = key_range(p, seq, task, group);
    load_queries();
    finish_stores();
    clear_partition<kRows>(s.total, kHeadSize);
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      run_partition(task.first_partition + i, range);
      if (partials != nullptr) {
        __builtin_memcpy(partials + i * partial_floats, s.part, sizeof(s.part));
      } else {
        fold_partition<kRows>(s.total, s.part, kHeadSize);
      }
    }
    if (partials == nullptr) write_output();
  }

  void fold(const float* partials, int64_t partial_floats) {
    clear_partition<kRows>(s.total, kHeadSize);
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      __builtin_memcpy(s.part, partials + i * partial_floats, sizeof(s.part));
      fold_partition<kRows>(s.total, s.part, kHeadSize);
    }
    write_output();
  }
};

}  // namespace
}  // namespace pagemill
