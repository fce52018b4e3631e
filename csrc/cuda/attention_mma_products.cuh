// The two products of attention, of one warp's rows with a tile of keys and with one of values.
#pragma once

#include "attention_mma_tiling.cuh"

namespace pagemill::cuda::mma {

// A warp's rows of the query: fragments in registers, or rows in shared memory that only this warp touches.
template <typename Tile, typename T>
struct WarpQuery {
  uint32_t fragments[Tile::kQueryInRegisters ? Tile::kSteps : 1][4];
  uint32_t address;  // of the warp's rows
  LaneAddress<Tile::kHeadSize> lane;

  __device__ explicit WarpQuery(uint32_t warp_rows)
      : address(warp_rows), lane(warp_rows, threadIdx.x & 15, (threadIdx.x >> 4) & 1) {}

  __device__ void start_load(const PagedAttentionParams& p, const Item& item, int warp_row) {
    const int lane_id = threadIdx.x & 31;
    const T* query = static_cast<const T*>(p.query) + item.head * p.query_head_stride;
    if constexpr (Tile::kQueryInRegisters) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp_row + (lane_id >> 2) + half * 8;
        const bool is_present = row < item.num_queries;
        const T* source = query + int64_t{item.first_token + (is_present ? row : 0)} * p.query_token_stride;
#pragma unroll
        for (int step = 0; step < Tile::kSteps; ++step) {
#pragma unroll
          for (int side = 0; side < 2; ++side) {
            const uint32_t pair = *reinterpret_cast<const uint32_t*>(source + step * 16 + side * 8 + (lane_id & 3) * 2);
            fragments[step][side * 2 + half] = is_present ? pair : 0u;
          }
        }
      }
    } else {
      using Layout = RowLayout<Tile::kHeadSize>;
      const T* const first = query + int64_t{item.first_token + warp_row} * p.query_token_stride;
      const int num_rows = item.num_queries - warp_row;
#pragma unroll
      for (int i = 0; i < Tile::kWarpRows * Layout::kChunks / 32; ++i) {
        // Where a row has 8 or 16 chunks the pointers advance by equal steps. Nothing is read from a row that is not
        // there.
        const uint32_t index = lane_id + i * 32, row = index / Layout::kChunks, chunk = index % Layout::kChunks;
        const int64_t offset = 32 % Layout::kChunks == 0 ? lane_id / Layout::kChunks * p.query_token_stride +
                                                               i * (32 / Layout::kChunks * p.query_token_stride)
                                                         : row * p.query_token_stride;
        copy_16_async(address + Layout::offset(row, chunk), first + offset + chunk * 8,
                      static_cast<int>(row) < num_rows ? 16 : 0);
      }
    }
  }

  __device__ void load_step(int step, uint32_t (&a)[Tile::kRowTiles][4]) const {
    if constexpr (Tile::kQueryInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][i] = fragments[step][i];
    } else {
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
        load_matrices(a[r], lane.at(r, step));
      }
    }
  }
};

// scores = query · keysᵀ.
template <typename Tile, typename T>
__device__ inline void score_tile(const WarpQuery<Tile, T>& query, uint32_t keys,
                                  float (&scores)[Tile::kRowTiles][Tile::kColumnTiles][4]) {
  const int lane = threadIdx.x & 31;
  const LaneAddress<Tile::kHeadSize> key_lane(keys, (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    uint32_t a[Tile::kRowTiles][4];
    query.load_step(step, a);
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, key_lane.at(n, step));
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
        if (step == 0) {
          multiply<T>(scores[r][2 * n], a[r], b[0], b[1]);
          multiply<T>(scores[r][2 * n + 1], a[r], b[2], b[3]);
        } else {
          multiply_add<T>(scores[r][2 * n], a[r], b[0], b[1]);
          multiply_add<T>(scores[r][2 * n + 1], a[r], b[2], b[3]);
        }
      }
    }
  }
}

// Weights as the left operand of a product, 16 keys to each.
template <typename Tile>
using Weights = uint32_t[Tile::kKeys / 16][Tile::kRowTiles][4];

template <typename Tile, typename T>
__device__ inline void pack_weights(const float (&scores)[Tile::kRowTiles][Tile::kColumnTiles][4],
                                    Weights<Tile>& weights) {
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&w)[4] = scores[r][2 * k + (i >> 1)];
        weights[k][r][i] = pack<T>(w[(i & 1) * 2], w[(i & 1) * 2 + 1]);
      }
    }
  }
}

// out += weights · values.
template <typename Tile, typename T>
__device__ inline void add_values(const Weights<Tile>& weights, uint32_t values,
                                  float (&out)[Tile::kRowTiles][Tile::kOutTiles][4]) {
  const int lane = threadIdx.x & 31;
  const LaneAddress<Tile::kHeadSize> value_lane(values, lane & 15, lane >> 4);
#pragma unroll
  for (int k = 0; k < Tile::kKeys / 16; ++k) {
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      uint32_t b[4];
      load_matrices_transposed(b, value_lane.at(k, step));
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
        multiply_add<T>(out[r][2 * step], weights[k][r], b[0], b[1]);
        multiply_add<T>(out[r][2 * step + 1], weights[k][r], b[2], b[3]);
      }
    }
  }
}

}  // namespace pagemill::cuda::mma
