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

  // Of 32 rows: w.scores[row][key] = Q K^T, one (sub-block, chunk) a step, so that steps can be put between vector
  // instructions.
  template <int kHeadSize>
  struct ScoreSteps {
    const typename Bf16Shape<kHeadSize>::RowGroup& g;
    const typename Bf16Shape<kHeadSize>::KeyBlock& block;
    typename Bf16Shape<kHeadSize>::Weights& w;
    int sub = 0, chunk = 0;

    static constexpr int count(int num_subs) { return num_subs * Bf16Shape<kHeadSize>::kChunks; }

    PAGEMILL_INLINE void step() {
      constexpr long kStride = kKeyBlock * 4;
      finish_stores();
      if (chunk == 0) clear_sums();
      const bool is_last = chunk + 1 == Bf16Shape<kHeadSize>::kChunks;
      const int next_sub = is_last ? (sub + 1) % kSubBlocks : sub, next_chunk = is_last ? 0 : chunk + 1;
      fetch_tile(block.keys[2 * next_sub][next_chunk]);
      fetch_tile(block.keys[2 * next_sub + 1][next_chunk]);
      multiply(g.query[0][chunk], g.query[1][chunk], block.keys[2 * sub][chunk], block.keys[2 * sub + 1][chunk]);
      if (++chunk < Bf16Shape<kHeadSize>::kChunks) return;
      chunk = 0;
      _tile_stored(0, w.scores[0] + sub * 32, kStride);
      _tile_stored(1, w.scores[0] + sub * 32 + 16, kStride);
      _tile_stored(2, w.scores[16] + sub * 32, kStride);
      _tile_stored(3, w.scores[16] + sub * 32 + 16, kStride);
      finish_stores();
      ++sub;
    }
  };

  // Of 32 rows: g.out[row][dim] += P V, one (chunk, sub-block) a step.
  template <int kHeadSize>
  struct ValueSteps {
    typename Bf16Shape<kHeadSize>::RowGroup& g;
    const typename Bf16Shape<kHeadSize>::KeyBlock& block;
    const typename Bf16Shape<kHeadSize>::Weights& w;
    const int num_subs;
    int sub = 0, chunk = 0;

    static constexpr int count(int num_subs) { return num_subs * Bf16Shape<kHeadSize>::kChunks; }

    PAGEMILL_INLINE void step() {
      constexpr long kStride = Bf16Shape<kHeadSize>::kPaddedSize * 4;
      float* top = g.out[0] + chunk * 32;
      float* bottom = g.out[16] + chunk * 32;
      finish_stores();
      if (sub == 0) {
        if (g.started) {
          _tile_loadd(0, top, kStride);
          _tile_loadd(1, top + 16, kStride);
          _tile_loadd(2, bottom, kStride);
          _tile_loadd(3, bottom + 16, kStride);
        } else {
          clear_sums();
        }
      }
      const bool is_last = sub + 1 == num_subs;
      const int next_sub = is_last ? 0 : sub + 1;
      const int next_chunk = is_last ? (chunk + 1) % Bf16Shape<kHeadSize>::kChunks : chunk;
      fetch_tile(block.values[next_sub][2 * next_chunk]);
      fetch_tile(block.values[next_sub][2 * next_chunk + 1]);
      multiply(w.weights[0][sub], w.weights[1][sub], block.values[sub][2 * chunk], block.values[sub][2 * chunk + 1]);
      if (++sub < num_subs) return;
      sub = 0;
      _tile_stored(0, top, kStride);
      _tile_stored(1, top + 16, kStride);
      _tile_stored(2, bottom, kStride);
      _tile_stored(3, bottom + 16, kStride);
      finish_stores();
      ++chunk;
    }
  };

  // A block's tiles have room in the second cache alone.
  static PAGEMILL_INLINE void fetch_tile(const uint16_t (*tile)[32]) {
    for (int i = 0; i < 16; ++i) _mm_prefetch(reinterpret_cast<const char*>(tile[i]), _MM_HINT_T0);
  }

  static PAGEMILL_INLINE void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static PAGEMILL_INLINE void multiply(const void* top, const void* bottom, const void* left, const void* right) {
    _tile_loadd(4, top, 64);
    _tile_loadd(6, left, 64);
    _tile_loadd(7, right, 64);
    _tile_loadd(5, bottom, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // Weights of the rows [first, last) of a group, and spread between them the steps of another group's products: tiles
  // and vector units work at the same time.
  template <typename Tile, typename Steps>
  static PAGEMILL_INLINE void weigh_rows(Tile& tile, int group, int first, int last, int32_t first_key,
                                         typename Tile::Weights& w, Steps* steps, int num_steps) {
    constexpr int kHalf = 16;
    int done = 0;
    for (int row = first; row < last; ++row) {
      for (const int due = num_steps * (row - first + 1) / kHalf; done < due; ++done) steps->step();
      tile.weigh_row(group, row, first_key, w);
    }
    for (; done < num_steps; ++done) steps->step();
  }

  // All groups of a task over one block. While a group's first rows are weighed, the next one's scores are made; while
  // its last rows are, the values of the one before are added.
  template <typename Tile>
  static PAGEMILL_INLINE void run_groups(Tile& tile, const typename Tile::BlockKeys& keys) {
    using Scores = ScoreSteps<Tile::kSize>;
    using Values = ValueSteps<Tile::kSize>;
    int groups[kMaxGroups], subs[kMaxGroups], count = 0;
    for (int i = 0; i < tile.num_groups; ++i) {
      subs[count] = tile.subs_of(i, keys);
      groups[count] = i;
      count += subs[count] > 0;
    }
    auto& s = tile.s;
    const auto add_values = [&](int n, auto body) {
      auto& g = s.groups[groups[n]];
      Values steps{g, s.block, s.weights[n % 2], subs[n]};
      body(&steps, Values::count(subs[n]));
      g.started = true;
    };
    for (int n = 0; n <= count; ++n) {
      // Scores of group n beside the first weights of group n - 1, then values of n - 2 beside the last ones.
      const int weighed = n > 0 ? groups[n - 1] : 0;
      const int rows = n > 0 ? tile.rows_of(weighed) : 0;
      const int half = rows < 16 ? rows : 16;
      auto& w = s.weights[(n + 1) % 2];
      if (n < count) {
        Scores steps{s.groups[groups[n]], s.block, s.weights[n % 2]};
        // The weights of group n - 2, in the same memory, are still to be used; its scores are not.
        weigh_rows(tile, weighed, 0, half, keys.first, w, &steps, Scores::count(subs[n]));
      } else {
        weigh_rows(tile, weighed, 0, half, keys.first, w, static_cast<Scores*>(nullptr), 0);
      }
      if (n >= 2) {
        add_values(n - 2, [&](Values* steps, int num_steps) {
          weigh_rows(tile, weighed, half, rows, keys.first, w, steps, num_steps);
        });
      } else {
        weigh_rows(tile, weighed, half, rows, keys.first, w, static_cast<Values*>(nullptr), 0);
      }
    }
    if (count > 0) {
      add_values(count - 1, [](Values* steps, int num_steps) {
        for (int i = 0; i < num_steps; ++i) steps->step();
      });
    }
  }

  // Few rows leave most of a tile empty, so the keys come first and are read where they lie: S^T = K Q^T. Q^T in pairs
  // takes the place of the second query tile.
  template <int kHeadSize>
  static void prepare_few_rows(typename Bf16Shape<kHeadSize>::RowGroup& g) {
    for (int c = 0; c < Bf16Shape<kHeadSize>::kChunks; ++c) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(g.query[0][c][i]);
      transpose_16x16(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(g.query[1][c][i], r[i]);
    }
  }

  // Scores of one block. Between the products the first values are brought into pair layout: vector instructions that
  // do not wait for the tiles.
  template <typename Tile>
  static PAGEMILL_INLINE void score_few_rows(Tile& tile, const typename Tile::BlockKeys& keys,
                                             const typename Tile::Rows* value_rows, int32_t range_end) {
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
        interleave_pair(tile, keys, value_rows, sub, 0, range_end);
      }
      finish_stores();
      for (int i = 0; i < count; ++i) {
        for (int row = 0; row < tile.task.num_rows; row += 4) {
          transpose_quad(scores[i][0] + row, tile.s.weights[0].scores[row] + (first + i) * 16);
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
      _tile_loadd(4, tile.s.groups[0].query[1][c], 64);
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
  static PAGEMILL_INLINE void interleave_pair(Tile& tile, const typename Tile::BlockKeys& keys,
                                              const typename Tile::Rows* rows, int sub, int pair, int32_t range_end) {
    uint16_t (*tiles)[16][32] = tile.s.block.values[sub] + pair % 2 * 4;
    for (int i = 0; i < 2 && 2 * pair + i < Tile::kChunks; ++i) {
      const int32_t next = keys.first + kKeyBlock + sub * kSubKeys;
      tile.interleave_and_prefetch(rows[2 * sub], 2 * pair + i, tiles + 2 * i, 0, next, range_end);
      tile.interleave_and_prefetch(rows[2 * sub + 1], 2 * pair + i, tiles + 2 * i, 8, next + 16, range_end);
    }
  }

  // g.out[row][dim] += P V for one tile of rows, 64 dims at a time; between the products the next ones are brought into
  // pair layout.
  template <typename Tile>
  static PAGEMILL_INLINE void values_of_few_rows(Tile& tile, const typename Tile::BlockKeys& keys,
                                                 const typename Tile::Rows* value_rows, int32_t range_end) {
    constexpr int kPairs = (Tile::kChunks + 1) / 2;
    constexpr long kStride = Tile::kPaddedSize * 4;
    const int num_subs = keys.num_subs();
    auto& g = tile.s.groups[0];
    for (int pair = 0; pair < kPairs; ++pair) {
      float* out = g.out[0] + pair * 64;
      // An odd last chunk multiplies whatever is there a second time and stores it nowhere.
      const bool has_second = 2 * pair + 1 < Tile::kChunks;
      finish_stores();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      if (g.started) {
        _tile_loadd(0, out, kStride);
        _tile_loadd(1, out + 16, kStride);
        if (has_second) {
          _tile_loadd(2, out + 32, kStride);
          _tile_loadd(3, out + 48, kStride);
        }
      }
      for (int sub = 0; sub < num_subs; ++sub) {
        const auto* tiles = tile.s.block.values[sub] + pair % 2 * 4;
        const auto* second = has_second ? tiles + 2 : tiles;
        _tile_loadd(4, tile.s.weights[0].weights[0][sub], 64);
        _tile_loadd(5, tiles[0], 64);
        _tile_loadd(6, tiles[1], 64);
        _tile_loadd(7, second[0], 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, second[1], 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 4, 5);
        tile.prefetch_part(tile.pages.keys, keys.first + kKeyBlock + sub * kSubKeys, range_end, pair, kPairs);
        if (pair + 1 < kPairs) interleave_pair(tile, keys, value_rows, sub, pair + 1, range_end);
      }
      _tile_stored(0, out, kStride);
      _tile_stored(1, out + 16, kStride);
      if (has_second) {
        _tile_stored(2, out + 32, kStride);
        _tile_stored(3, out + 48, kStride);
      }
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
