// Prefill on tensor cores by mma.m16n8k16, sm_80 and later: the scheme of FlashAttention-2 (Dao, 2023) over pages.
//
// A block takes a tile of query tokens of one sequence and one query head; each of its warps owns kRowTiles * 16 of the
// rows, and folds all keys in ascending order, kKeys at a time. The tiles of keys begin at multiples of kKeys, so that
// a row's result depends on its own query and keys alone.
#pragma once

#include "attention_mma_loader.cuh"
#include "attention_mma_softmax.cuh"
#include "pagemill/attention_plan.h"

namespace pagemill::cuda::mma {

// How a block is cut. With two row tiles to a warp a fragment of keys feeds twice the products, which the bandwidth of
// shared memory asks for; above head size 128 the accumulators leave room for one only, and queries stay in registers.
template <int kHeadSize_, int kWarps_, int kRowTiles_, int kKeys_, int kStages_, int kMinBlocks_, int kAhead_ = 1>
struct Tiling {
  static constexpr int kHeadSize = kHeadSize_, kWarps = kWarps_, kRowTiles = kRowTiles_, kKeys = kKeys_;
  static constexpr int kStages = kStages_, kMinBlocks = kMinBlocks_, kAhead = kAhead_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr bool kQueryInRegisters = kRowTiles == 1;
  static constexpr int kSteps = kHeadSize / 16;  // of 16 dimensions
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kRows * RowLayout<kHeadSize>::kRowBytes;
  static constexpr int kTileBytes = kKeys * RowLayout<kHeadSize>::kRowBytes;
  static constexpr int kRawBytes = kKeys * kHeadSize;  // of a tile of 8-bit numbers
  static_assert(kPrefillTileQueries % kRows == 0);

  template <bool kIs8Bit>
  static constexpr int shared_bytes() {
    return kQueryBytes + (kIs8Bit ? 2 * kTileBytes + 2 * kRawBytes : 2 * kStages * kTileBytes);
  }
};

// What one block computes at a time.
struct Item {
  int32_t head, kv_head;
  int32_t first_token;  // row of query and out
  int32_t num_queries;
  int32_t first_position;  // of first_token in its sequence
  int32_t begin_key, end_key;
  const int32_t* table;
};

template <typename Tile>
__device__ inline bool find_item(const PagedAttentionParams& p, const int32_t* plan, int index, Item& item) {
  constexpr int kParts = kPrefillTileQueries / Tile::kRows;
  const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(plan);
  const int per_tile = p.num_query_heads * kParts;
  const PrefillTile tile = reinterpret_cast<const PrefillTile*>(plan + header.prefill_offset)[index / per_tile];
  // The last part of a tile sees the most keys.
  const int part = kParts - 1 - index % per_tile / p.num_query_heads;
  item.head = index % p.num_query_heads;
  item.kv_head = item.head / (p.num_query_heads / p.num_kv_heads);
  const int first_query = tile.first_query + part * Tile::kRows;
  item.num_queries = min(Tile::kRows, tile.num_queries - part * Tile::kRows);
  if (item.num_queries <= 0) return false;
  const int32_t start = p.query_start[tile.seq], num_new = p.query_start[tile.seq + 1] - start;
  item.first_token = start + first_query;
  item.first_position = p.context_lens[tile.seq] - num_new + first_query;
  item.end_key = item.first_position + item.num_queries;
  item.begin_key = p.window >= 0 ? max(0, item.first_position - p.window + 1) / Tile::kKeys * Tile::kKeys : 0;
  item.table = p.block_tables + (p.seq_slots != nullptr ? p.seq_slots[tile.seq] : tile.seq) * p.block_table_stride;
  return true;
}

// A warp's rows of the query: fragments in registers, or rows in shared memory that only this warp touches.
template <typename Tile, typename T>
struct WarpQuery {
  uint32_t fragments[Tile::kQueryInRegisters ? Tile::kSteps : 1][4];
  uint32_t address;  // of the warp's rows
  LaneAddress<Tile::kHeadSize> lane;

  __device__ explicit WarpQuery(uint32_t warp_rows)
      : address(warp_rows), lane(threadIdx.x & 15, (threadIdx.x >> 4) & 1) {}

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
#pragma unroll
      for (int i = 0; i < Tile::kWarpRows * Layout::kChunks / 32; ++i) {
        const int index = lane_id + i * 32, row = index / Layout::kChunks, chunk = index % Layout::kChunks;
        const bool is_present = warp_row + row < item.num_queries;
        const T* source = query + int64_t{item.first_token + (is_present ? warp_row + row : 0)} * p.query_token_stride;
        copy_16_async(address + Layout::offset(row, chunk), source + chunk * 8, is_present ? 16 : 0);
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
        load_matrices(a[r], address + r * 16 * RowLayout<Tile::kHeadSize>::kRowBytes + lane.offset(step));
      }
    }
  }
};

// scores = query · keysᵀ.
template <typename Tile, typename T>
__device__ inline void score_tile(const WarpQuery<Tile, T>& query, uint32_t keys,
                                  float (&scores)[Tile::kRowTiles][Tile::kKeys / 8][4]) {
  const int lane = threadIdx.x & 31;
  const LaneAddress<Tile::kHeadSize> key_lane((lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 8; ++n) {
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[r][n][c] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    uint32_t a[Tile::kRowTiles][4];
    query.load_step(step, a);
#pragma unroll
    for (int n = 0; n < Tile::kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, keys + n * 16 * RowLayout<Tile::kHeadSize>::kRowBytes + key_lane.offset(step));
#pragma unroll
      for (int r = 0; r < Tile::kRowTiles; ++r) {
        multiply_add<T>(scores[r][2 * n], a[r], b[0], b[1]);
        multiply_add<T>(scores[r][2 * n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// out += weights · values, for the 16 keys of column tiles 2 k and 2 k + 1.
template <typename Tile, typename T>
__device__ inline void add_values(const float (&weights)[Tile::kRowTiles][Tile::kKeys / 8][4], int k, uint32_t values,
                                  const LaneAddress<Tile::kHeadSize>& lane,
                                  float (&out)[Tile::kRowTiles][Tile::kHeadSize / 8][4]) {
  uint32_t a[Tile::kRowTiles][4];
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&w)[4] = weights[r][2 * k + (i >> 1)];
      a[r][i] = pack<T>(w[(i & 1) * 2], w[(i & 1) * 2 + 1]);
    }
  }
#pragma unroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    uint32_t b[4];
    load_matrices_transposed(b, values + k * 16 * RowLayout<Tile::kHeadSize>::kRowBytes + lane.offset(step));
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
      multiply_add<T>(out[r][2 * step], a[r], b[0], b[1]);
      multiply_add<T>(out[r][2 * step + 1], a[r], b[2], b[3]);
    }
  }
}

// Scores become weights, and out += weights · values: 16 keys at a time, the exponentials of the next beside the
// products of the last.
template <typename Tile, typename T>
__device__ inline void weigh_values(float (&scores)[Tile::kRowTiles][Tile::kKeys / 8][4], uint32_t values,
                                    float multiplier, RowState<Tile::kRowTiles>& state,
                                    float (&out)[Tile::kRowTiles][Tile::kHeadSize / 8][4]) {
  const int lane = threadIdx.x & 31;
  const LaneAddress<Tile::kHeadSize> value_lane(lane & 15, lane >> 4);
  float offsets[Tile::kRowTiles][2];
  exponent_offsets(state, offsets);
  constexpr int kChunks = Tile::kKeys / 16, kAhead = Tile::kAhead < kChunks ? Tile::kAhead : kChunks;
#pragma unroll
  for (int k = 0; k < kAhead; ++k) weigh_columns(scores, k, multiplier, offsets, state);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k + kAhead < kChunks) weigh_columns(scores, k + kAhead, multiplier, offsets, state);
    add_values<Tile, T>(scores, k, values, value_lane, out);
  }
}

// Divides by the sums, the sink's weight included, and writes rows and log-sum-exps.
template <typename Tile, typename T>
__device__ inline void write_rows(const PagedAttentionParams& p, const Item& item, int warp_row, float value_scale,
                                  const RowState<Tile::kRowTiles>& state,
                                  const float (&out)[Tile::kRowTiles][Tile::kHeadSize / 8][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[r][half], reference = state.reference[r][half], factor = 1.0f;
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (p.sinks != nullptr) {
        const float sink = p.sinks[item.head] * kLog2E, larger = fmaxf(reference, sink);
        factor = exp2f(reference - larger);
        sum = sum * factor + exp2f(sink - larger);
        reference = larger;
      }
      const int row = warp_row + r * 16 + (lane >> 2) + half * 8;
      if (row >= item.num_queries) continue;
      const int64_t token = item.first_token + row;
      const float inverse = sum > 0.0f ? factor * value_scale / sum : 0.0f;
      if (p.lse != nullptr && (lane & 3) == 0) {
        p.lse[token * p.num_query_heads + item.head] = (reference + log2f(sum)) * kLn2;
      }
      T* row_out = static_cast<T*>(p.out) + token * p.out_token_stride + item.head * p.out_head_stride + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < Tile::kHeadSize / 8; ++n) {
        *reinterpret_cast<uint32_t*>(row_out + n * 8) =
            pack<T>(out[r][n][half * 2] * inverse, out[r][n][half * 2 + 1] * inverse);
      }
    }
  }
}

// The tiles of keys and values of one item, one after the other, in shared memory.
template <typename Tile, bool kIs8Bit, typename T>
class TileStream {
 public:
  __device__ TileStream(const PagedAttentionParams& p, uint8_t* shared)
      : params_(p), shared_(shared), base_(shared_address(shared)), expansion_(fp8_expansion<T>(p.kv_dtype)) {}

  // Starts the copies of the item's first tile.
  __device__ void open(const Item& item) {
    rows_ = find_rows<Tile::kKeys>(params_, item.table, item.kv_head, item.begin_key, item.end_key);
    start_copies(item, item.begin_key);
  }

  // Waits for the tile at first_key and starts the copies of the next. The addresses stay valid until the next call.
  __device__ void advance(const Item& item, int first_key, uint32_t& keys, uint32_t& values) {
    wait_copies<0>();
    __syncthreads();
    if constexpr (kIs8Bit) {
      expand_tile<T, Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(shared_, raw(0), expansion_);
      expand_tile<T, Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(shared_ + Tile::kTileBytes, raw(1), expansion_);
      __syncthreads();
      keys = base_;
    } else {
      keys = base_ + stage_ * 2 * Tile::kTileBytes;
      stage_ = stage_ + 1 == Tile::kStages ? 0 : stage_ + 1;
    }
    values = keys + Tile::kTileBytes;
    if (first_key + Tile::kKeys < item.end_key) start_copies(item, first_key + Tile::kKeys);
  }

 private:
  __device__ uint8_t* raw(int which) { return shared_ + 2 * Tile::kTileBytes + which * Tile::kRawBytes; }

  __device__ void start_copies(const Item& item, int first_key) {
    if constexpr (kIs8Bit) {
      const auto offset = [](int row, int chunk) -> uint32_t { return row * Tile::kHeadSize + chunk * 16; };
      const uint32_t destination = base_ + 2 * Tile::kTileBytes;
      copy_tile<Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(destination, params_.key_cache, rows_, first_key,
                                                              item.end_key, offset);
      copy_tile<Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(destination + Tile::kRawBytes, params_.value_cache, rows_,
                                                              first_key, item.end_key, offset);
    } else {
      const auto offset = [](int row, int chunk) { return RowLayout<Tile::kHeadSize>::offset(row, chunk); };
      const uint32_t destination = base_ + stage_ * 2 * Tile::kTileBytes;
      copy_tile<Tile::kKeys, Tile::kThreads, Tile::kHeadSize * 2>(destination, params_.key_cache, rows_, first_key,
                                                                  item.end_key, offset);
      copy_tile<Tile::kKeys, Tile::kThreads, Tile::kHeadSize * 2>(destination + Tile::kTileBytes, params_.value_cache,
                                                                  rows_, first_key, item.end_key, offset);
    }
    commit_copies();
    // The pages of the tile after, long before they are asked for.
    rows_ = find_rows<Tile::kKeys>(params_, item.table, item.kv_head, first_key + Tile::kKeys, item.end_key);
  }

  const PagedAttentionParams& params_;
  uint8_t* shared_;
  uint32_t base_;
  Fp8Expansion expansion_;
  TileRows rows_{-1};
  int stage_ = 0;
};

template <typename Tile, typename T, bool kIs8Bit>
__device__ inline void attend(const PagedAttentionParams& p, const Item& item, int warp_row, WarpQuery<Tile, T>& query,
                              TileStream<Tile, kIs8Bit, T>& stream) {
  const float key_scale = kIs8Bit && p.key_scale != nullptr ? p.key_scale[item.kv_head] : 1.0f;
  const float value_scale = kIs8Bit && p.value_scale != nullptr ? p.value_scale[item.kv_head] : 1.0f;
  const LogitRule rule{p.scale * key_scale, p.soft_cap, p.alibi_slopes != nullptr ? p.alibi_slopes[item.head] : 0.0f,
                       p.window};
  const float multiplier = rule.multiplier();
  const int first_position = item.first_position + warp_row;
  const int last_position = item.first_position + min(warp_row + Tile::kWarpRows, item.num_queries) - 1;
  const bool has_rows = warp_row < item.num_queries;

  float out[Tile::kRowTiles][Tile::kHeadSize / 8][4] = {};
  RowState<Tile::kRowTiles> state;
  state.clear();
  query.start_load(p, item, warp_row);
  stream.open(item);
  for (int first_key = item.begin_key; first_key < item.end_key; first_key += Tile::kKeys) {
    uint32_t keys, values;
    stream.advance(item, first_key, keys, values);
    const int end_key = first_key + Tile::kKeys;
    const bool is_seen =
        has_rows && first_key <= last_position && (p.window < 0 || end_key > first_position - p.window + 1);
    if (!is_seen) continue;
    float scores[Tile::kRowTiles][Tile::kKeys / 8][4];
    score_tile<Tile, T>(query, keys, scores);
    if (!rule.is_linear()) apply_rule(scores, rule, first_position, first_key);
    const bool is_cut = end_key > first_position + 1 || (p.window >= 0 && first_key <= last_position - p.window);
    if (is_cut) hide_unseen(scores, p.window, first_position, first_key);
    move_references(scores, multiplier, state, out);
    weigh_values<Tile, T>(scores, values, multiplier, state, out);
  }
  if (has_rows) write_rows<Tile, T>(p, item, warp_row, value_scale, state, out);
}

// Items in the plan's order, costliest first; every second turn runs backwards over the blocks, so that the block with
// the costliest item of one turn gets the cheapest of the next.
template <typename Tile, typename T, bool kIs8Bit>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    prefill_mma_kernel(const __grid_constant__ PagedAttentionParams p, const int32_t* __restrict__ plan) {
  extern __shared__ __align__(128) uint8_t shared[];
  const int warp_row = (threadIdx.x >> 5) * Tile::kWarpRows;
  WarpQuery<Tile, T> query(shared_address(shared) + warp_row * RowLayout<Tile::kHeadSize>::kRowBytes);
  TileStream<Tile, kIs8Bit, T> stream(p, shared + Tile::kQueryBytes);
  const int num_items = reinterpret_cast<const PlanHeader*>(plan)->num_prefill_tiles * p.num_query_heads *
                        (kPrefillTileQueries / Tile::kRows);
  for (int turn = 0;; ++turn) {
    const int place = (turn & 1) != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    if (turn * static_cast<int>(gridDim.x) >= num_items) break;
    const int index = turn * gridDim.x + place;
    Item item;
    if (index >= num_items || !find_item<Tile>(p, plan, index, item)) continue;
    attend<Tile, T, kIs8Bit>(p, item, warp_row, query, stream);
  }
}

}  // namespace pagemill::cuda::mma
