// bfloat16 products by VDPBF16PS, on the layouts that the tiles use. Include from a file compiled with AVX512_BF16.
//
// A sum takes one pair of depth at a time, in order.
#pragma once

#include "attention_bf16_impl.h"

namespace pagemill {
namespace {

struct DotProducts {
  static constexpr bool kTakesFewRows = false;
  static constexpr int kBlockRows = 4;     // of sums in registers
  static constexpr int kBlockVectors = 4;  // same, of 16 columns

  struct Session {};

  template <int kHeadSize>
  using Shape = Bf16Shape<kHeadSize>;

  using Sums = __m512[kBlockRows][kBlockVectors];

  static PAGEMILL_INLINE __m512bh broadcast_pair(const uint16_t* x) {
    int32_t pair;
    __builtin_memcpy(&pair, x, 4);
    return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
  }

  // 32 numbers of depth. left: [row][left_stride]; right: the tiles of kBlockVectors columns, [pair][16][2].
  template <int kVectors>
  static PAGEMILL_INLINE void multiply(Sums& sums, const uint16_t* left, int left_stride,
                                       const uint16_t* const* right) {
    for (int pair = 0; pair < 16; ++pair) {
      __m512bh columns[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = reinterpret_cast<__m512bh>(_mm512_load_si512(right[v] + pair * 32));
      }
      for (int r = 0; r < kBlockRows; ++r) {
        const __m512bh x = broadcast_pair(left + r * left_stride + 2 * pair);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], columns[v], x);
      }
    }
  }

  // All groups of a task over one block.
  template <typename Tile>
  static PAGEMILL_INLINE void run_groups(Tile& tile, const typename Tile::BlockKeys& keys) {
    auto& s = tile.s;
    for (int i = 0; i < tile.num_groups; ++i) {
      const int subs = tile.subs_of(i, keys);
      if (subs == 0) continue;
      const int rows = tile.rows_of(i);
      scores<Tile::kSize>(s.groups[i], s.block, s.weights, rows, subs);
      weigh_rows(tile, i, keys.first);
      values<Tile::kSize>(s.groups[i], s.block, s.weights, rows, subs);
      s.groups[i].started = true;
    }
  }

  template <int kHeadSize>
  static PAGEMILL_INLINE void scores(const typename Shape<kHeadSize>::RowGroup& g,
                                     const typename Shape<kHeadSize>::KeyBlock& block,
                                     typename Shape<kHeadSize>::Weights& w, int num_rows, int num_subs) {
    for (int tile = 0; tile < 2 * num_subs; tile += kBlockVectors) {
      for (int row = 0; row < num_rows; row += kBlockRows) {
        Sums sums;
        for (auto& of_row : sums) {
          for (__m512& sum : of_row) sum = _mm512_setzero_ps();
        }
        for (int c = 0; c < Shape<kHeadSize>::kChunks; ++c) {
          const uint16_t* right[kBlockVectors];
          for (int v = 0; v < kBlockVectors; ++v) right[v] = block.keys[tile + v][c][0];
          multiply<kBlockVectors>(sums, g.query[c][row], 32, right);
        }
        for (int r = 0; r < kBlockRows; ++r) {
          for (int v = 0; v < kBlockVectors; ++v) _mm512_store_ps(w.scores[row + r] + (tile + v) * 16, sums[r][v]);
        }
      }
    }
  }

  template <int kHeadSize>
  static PAGEMILL_INLINE void values(typename Shape<kHeadSize>::RowGroup& g,
                                     const typename Shape<kHeadSize>::KeyBlock& block,
                                     const typename Shape<kHeadSize>::Weights& w, int num_rows, int num_subs) {
    constexpr int kTiles = 2 * Shape<kHeadSize>::kChunks;
    int tile = 0;
    for (; tile + kBlockVectors <= kTiles; tile += kBlockVectors) {
      value_tiles<kHeadSize, kBlockVectors>(g, block, w, num_rows, num_subs, tile);
    }
    if constexpr (kTiles % kBlockVectors != 0) {
      value_tiles<kHeadSize, kTiles % kBlockVectors>(g, block, w, num_rows, num_subs, tile);
    }
  }

  template <int kHeadSize, int kVectors>
  static PAGEMILL_INLINE void value_tiles(typename Shape<kHeadSize>::RowGroup& g,
                                          const typename Shape<kHeadSize>::KeyBlock& block,
                                          const typename Shape<kHeadSize>::Weights& w, int num_rows, int num_subs,
                                          int tile) {
    for (int row = 0; row < num_rows; row += kBlockRows) {
      Sums sums;
      for (int r = 0; r < kBlockRows; ++r) {
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = g.started ? _mm512_load_ps(g.out[row + r] + (tile + v) * 16) : _mm512_setzero_ps();
        }
      }
      for (int sub = 0; sub < num_subs; ++sub) {
        const uint16_t* right[kVectors];
        for (int v = 0; v < kVectors; ++v) right[v] = block.values[sub][tile + v][0];
        multiply<kVectors>(sums, w.row(row) + sub * kSubKeys, w.kRowStride, right);
      }
      for (int r = 0; r < kBlockRows; ++r) {
        for (int v = 0; v < kVectors; ++v) _mm512_store_ps(g.out[row + r] + (tile + v) * 16, sums[r][v]);
      }
    }
  }
};

}  // namespace
}  // namespace pagemill
