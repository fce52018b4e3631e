// bfloat16 products on AMX tiles. Include from a file compiled with AMX.
//
// A product adds to each sum, in one rounding, what 32 numbers of depth give; which operand comes first changes no bit.
#pragma once

#include "attention_bf16_impl.h"

namespace pagemill {
namespace {

// GCC's tile loads do not say that they read memory: stores before them must be finished explicitly.
PAGEMILL_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

struct AmxProducts {
  static constexpr bool kTakesFewRows = true;

  struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  // Tiles are per-thread state that a kernel must leave clean.
  class Session {
   public:
    Session() {
      static constexpr TileConfig kConfig{};
      _tile_loadconfig(&kConfig);
    }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static PAGEMILL_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Four products of one left tile. The tiles are read from the first cache, where a block's keys and values and one
  // group of 16 rows have room together.
  static PAGEMILL_INLINE void multiply(const void* left, long left_stride, const void* first, const void* second,
                                       const void* third, const void* fourth) {
    _tile_loadd(6, left, left_stride);
    _tile_loadd(4, first, 64);
    _tile_loadd(5, second, 64);
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(4, third, 64);
    _tile_loadd(5, fourth, 64);
    _tile_dpbf16ps(2, 6, 4);
    _tile_dpbf16ps(3, 6, 5);
  }

  // w.scores[row][key] = Q K^T; two sub-blocks at a time.
  template <int kHeadSize>
  static PAGEMILL_INLINE void scores(const typename Bf16Shape<kHeadSize>::RowGroup& g,
                                     const typename Bf16Shape<kHeadSize>::KeyBlock& block,
                                     typename Bf16Shape<kHeadSize>::Weights& w, int num_subs) {
    constexpr long kStride = kKeyBlock * 4;
    finish_stores();
    for (int tile = 0; tile < 2 * num_subs; tile += 4) {
      clear_sums();
      const auto* keys = block.keys + tile;
      for (int c = 0; c < Bf16Shape<kHeadSize>::kChunks; ++c) {
        multiply(g.query[c], 64, keys[0][c], keys[1][c], keys[2][c], keys[3][c]);
      }
      float* to = w.scores[0] + tile * 16;
      _tile_stored(0, to, kStride);
      _tile_stored(1, to + 16, kStride);
      _tile_stored(2, to + 32, kStride);
      _tile_stored(3, to + 48, kStride);
    }
    finish_stores();
  }

  // g.out[row][dim] += P V, 64 dims at a time.
  template <int kHeadSize>
  static PAGEMILL_INLINE void values(typename Bf16Shape<kHeadSize>::RowGroup& g,
                                     const typename Bf16Shape<kHeadSize>::KeyBlock& block,
                                     const typename Bf16Shape<kHeadSize>::Weights& w, int num_subs) {
    constexpr int kChunks = Bf16Shape<kHeadSize>::kChunks;
    finish_stores();
    for (int c = 0; c < kChunks; c += 2) {
      // An odd last chunk multiplies its own values a second time and stores them nowhere.
      const bool has_second = c + 1 < kChunks;
      const int next = has_second ? 2 * c + 2 : 2 * c;
      load_or_clear_sums<kHeadSize>(g, c, has_second);
      for (int sub = 0; sub < num_subs; ++sub) {
        const auto* tiles = block.values[sub];
        multiply(w.row(0) + sub * kSubKeys, w.kRowStride * 2, tiles[2 * c], tiles[2 * c + 1], tiles[next],
                 tiles[next + 1]);
      }
      store_sums<kHeadSize>(g, c, has_second);
    }
    finish_stores();
  }

  // The sums of 64 dims, or of 32 where there is no second chunk.
  template <int kHeadSize>
  static PAGEMILL_INLINE void load_or_clear_sums(const typename Bf16Shape<kHeadSize>::RowGroup& g, int chunk,
                                                 bool has_second) {
    constexpr long kStride = Bf16Shape<kHeadSize>::kPaddedSize * 4;
    const float* out = g.out[0] + chunk * 32;
    if (!g.started) return clear_sums();
    _tile_loadd(0, out, kStride);
    _tile_loadd(1, out + 16, kStride);
    if (!has_second) return;
    _tile_loadd(2, out + 32, kStride);
    _tile_loadd(3, out + 48, kStride);
  }

  template <int kHeadSize>
  static PAGEMILL_INLINE void store_sums(typename Bf16Shape<kHeadSize>::RowGroup& g, int chunk, bool has_second) {
    constexpr long kStride = Bf16Shape<kHeadSize>::kPaddedSize * 4;
    float* out = g.out[0] + chunk * 32;
    _tile_stored(0, out, kStride);
    _tile_stored(1, out + 16, kStride);
    if (!has_second) return;
    _tile_stored(2, out + 32, kStride);
    _tile_stored(3, out + 48, kStride);
  }

  // All groups of a task over one block.
  template <typename Tile>
  static PAGEMILL_INLINE void run_groups(Tile& tile, const typename Tile::BlockKeys& keys) {
    auto& s = tile.s;
    for (int i = 0; i < tile.num_groups; ++i) {
      const int subs = tile.subs_of(i, keys);
      if (subs == 0) continue;
      scores<Tile::kSize>(s.groups[i], s.block, s.weights, subs);
      weigh_rows(tile, i, keys.first);
      values<Tile::kSize>(s.groups[i], s.block, s.weights, subs);
      s.groups[i].started = true;
    }
  }

  // Few rows leave most of a tile empty, so the keys come first and are read where they lie: S^T = K Q^T.
  template <int kHeadSize>
  static void prepare_few_rows(Bf16Scratch<kHeadSize>& s) {
    for (int c = 0; c < Bf16Shape<kHeadSize>::kChunks; ++c) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(s.groups[0].query[c][i]);
      transpose_16x16(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(s.query_pairs[c][i], r[i]);
    }
  }

  // Scores of one block. Between the products the first values are brought into pair layout: vector instructions that
  // do not wait for the tiles.
  template <typename Tile>
  static PAGEMILL_INLINE void score_few_rows(Tile& tile, const typename Tile::BlockKeys& keys,
                                             const typename Tile::Rows* value_rows,
                                             const typename Tile::KeysAhead& ahead) {
    constexpr int kQuad = 4;
    alignas(64) float scores[kQuad][16][16];
    const int num_tiles = 2 * keys.num_subs();
    for (int first = 0; first < num_tiles; first += kQuad) {
      const int count = num_tiles - first < kQuad ? num_tiles - first : kQuad;
      KeyTile key_tiles[kQuad];
      for (int i = 0; i < kQuad; ++i) key_tiles[i] = tile.key_tile(keys, first + (i < count ? i : 0));
      finish_stores();
      multiply_keys(tile, key_tiles, scores);
      for (int sub = first / 2; sub < (first + count) / 2; ++sub) {
        interleave_pair(tile, value_rows, sub, 0, ahead);
      }
      finish_stores();
      for (int i = 0; i < count; ++i) {
        for (int row = 0; row < tile.task.num_rows; row += 4) {
          transpose_quad(scores[i][0] + row, tile.s.weights.scores[row] + (first + i) * 16);
        }
      }
    }
  }

  template <typename Tile>
  static PAGEMILL_INLINE void multiply_keys(Tile& tile, const KeyTile (&keys)[4], float (&scores)[4][16][16]) {
    const char* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = static_cast<const char*>(keys[i].rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < Tile::kChunks; ++c) {
      _tile_loadd(4, tile.s.query_pairs[c], 64);
      _tile_loadd(5, rows[0] + c * 64, keys[0].stride_bytes);
      _tile_loadd(6, rows[1] + c * 64, keys[1].stride_bytes);
      _tile_loadd(7, rows[2] + c * 64, keys[2].stride_bytes);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(5, rows[3] + c * 64, keys[3].stride_bytes);
      _tile_dpbf16ps(1, 6, 4);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, scores[0], 64);
    _tile_stored(1, scores[1], 64);
    _tile_stored(2, scores[2], 64);
    _tile_stored(3, scores[3], 64);
  }

  // 64 dims of one sub-block's values; two such pairs of chunks have room in the block.
  template <typename Tile>
  static PAGEMILL_INLINE void interleave_pair(Tile& tile, const typename Tile::Rows* rows, int sub, int pair,
                                              const typename Tile::KeysAhead& ahead) {
    uint16_t (*tiles)[16][32] = tile.s.block.values[sub] + pair % 2 * 4;
    for (int i = 0; i < 2 && 2 * pair + i < Tile::kChunks; ++i) {
      const int32_t next = ahead.first + sub * kSubKeys;
      tile.interleave_and_prefetch(rows[2 * sub], 2 * pair + i, tiles + 2 * i, 0, ahead, next);
      tile.interleave_and_prefetch(rows[2 * sub + 1], 2 * pair + i, tiles + 2 * i, 8, ahead, next + 16);
    }
  }

  // g.out[row][dim] += P V for one tile of rows, 64 dims at a time; between the products the next ones are brought into
  // pair layout.
  template <typename Tile>
  static PAGEMILL_INLINE void values_of_few_rows(Tile& tile, const typename Tile::BlockKeys& keys,
                                                 const typename Tile::Rows* value_rows,
                                                 const typename Tile::KeysAhead& ahead) {
    constexpr int kPairs = (Tile::kChunks + 1) / 2;
    const int num_subs = keys.num_subs();
    auto& g = tile.s.groups[0];
    const auto& w = tile.s.weights;
    for (int pair = 0; pair < kPairs; ++pair) {
      // An odd last chunk multiplies whatever is there a second time and stores it nowhere.
      const bool has_second = 2 * pair + 1 < Tile::kChunks;
      finish_stores();
      load_or_clear_sums<Tile::kSize>(g, 2 * pair, has_second);
      for (int sub = 0; sub < num_subs; ++sub) {
        const auto* tiles = tile.s.block.values[sub] + pair % 2 * 4;
        const auto* second = has_second ? tiles + 2 : tiles;
        _tile_loadd(4, w.row(0) + sub * kSubKeys, w.kRowStride * 2);
        _tile_loadd(5, tiles[0], 64);
        _tile_loadd(6, tiles[1], 64);
        _tile_loadd(7, second[0], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, second[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
        tile.prefetch_part(ahead, ahead.pages.keys, sub, pair, kPairs);
        if (pair + 1 < kPairs) interleave_pair(tile, value_rows, sub, pair + 1, ahead);
      }
      store_sums<Tile::kSize>(g, 2 * pair, has_second);
    }
    finish_stores();
  }

  // scores[key][row] of 16 keys and 4 rows to [row][key].
  static PAGEMILL_INLINE void transpose_quad(const float* from, float* to) {
    __m512 keys[4];  // lane l of keys[i]: key 4 l + i
    for (int i = 0; i < 4; ++i) {
      keys[i] = _mm512_castps128_ps512(_mm_load_ps(from + i * 16));
      keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(from + (4 + i) * 16), 1);
      keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(from + (8 + i) * 16), 2);
      keys[i] = _mm512_insertf32x4(keys[i], _mm_load_ps(from + (12 + i) * 16), 3);
    }
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(keys[0], keys[1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(keys[2], keys[3]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(keys[0], keys[1]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(keys[2], keys[3]));
    _mm512_store_ps(to, _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23)));
    _mm512_store_ps(to + kKeyBlock, _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23)));
    _mm512_store_ps(to + 2 * kKeyBlock, _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23)));
    _mm512_store_ps(to + 3 * kKeyBlock, _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23)));
  }
};

}  // namespace
}  // namespace pagemill
