// Prefill on tensor cores by mma.m16n8k16, sm_80 and later: the scheme of FlashAttention-2 (Dao, 2023) over pages.
//
// A block takes a tile of query tokens of one sequence and one query head; each of its warps owns kRowTiles * 16 of the
// rows, and folds all keys in ascending order, kKeys at a time. The tiles of keys begin at multiples of kKeys, so that
// a row's result depends on its own query and keys alone.
#pragma once

#include "attention_mma_products.cuh"
#include "attention_mma_softmax.cuh"
#include "attention_mma_stream.cuh"
#include "attention_mma_tiling.cuh"

namespace pagemill::cuda::mma {

// Divides by the sums, the sink's weight included, and writes rows and log-sum-exps. `staging`: the warp's rows of
// the query in shared memory, through which outputs take the shape of 16-byte stores; 0: there are none.
template <typename Tile, typename T>
__device__ inline void write_rows(const PagedAttentionParams& p, const Item& item, int warp_row, float value_scale,
                                  const RowState<Tile::kRowTiles>& state,
                                  const float (&out)[Tile::kRowTiles][Tile::kOutTiles][4], uint8_t* staging) {
  using Layout = RowLayout<Tile::kHeadSize>;
  const int lane = threadIdx.x & 31;
  T* const first_out =
      static_cast<T*>(p.out) + (item.first_token + warp_row) * p.out_token_stride + item.head * p.out_head_stride;
  const int num_rows = item.num_queries - warp_row;
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
      const float inverse = sum > 0.0f ? __fdividef(factor * value_scale, sum) : 0.0f;
      const int row = r * 16 + half * 8 + (lane >> 2);
      if (p.lse != nullptr && (lane & 3) == 0 && row < num_rows) {
        const int64_t token = item.first_token + warp_row + row;
        p.lse[token * p.num_query_heads + item.head] = (reference + log2f(sum)) * kLn2;
      }
      if constexpr (Tile::kQueryInRegisters) {
        if (row >= num_rows) continue;
      }
#pragma unroll
      for (int n = 0; n < Tile::kOutTiles; ++n) {
        const uint32_t pair = pack<T>(out[r][n][half * 2] * inverse, out[r][n][half * 2 + 1] * inverse);
        if constexpr (Tile::kQueryInRegisters) {
          *reinterpret_cast<uint32_t*>(first_out + row * p.out_token_stride + n * 8 + (lane & 3) * 2) = pair;
        } else {
          *reinterpret_cast<uint32_t*>(staging + Layout::offset(row, n) + (lane & 3) * 4) = pair;
        }
      }
    }
  }
  if constexpr (!Tile::kQueryInRegisters) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows * Layout::kChunks / 32; ++i) {
      const uint32_t index = lane + i * 32, row = index / Layout::kChunks, chunk = index % Layout::kChunks;
      if (static_cast<int>(row) < num_rows) {
        *reinterpret_cast<uint4*>(first_out + row * p.out_token_stride + chunk * 8) =
            *reinterpret_cast<const uint4*>(staging + Layout::offset(row, chunk));
      }
    }
    __syncwarp();
  }
}

// One warp's part of an item: its rows, their running softmax and outputs.
template <typename Tile, typename T>
struct WarpRows {
  using Scores = float[Tile::kRowTiles][Tile::kColumnTiles][4];

  const WarpQuery<Tile, T>& query;
  const LogitRule rule;
  const float multiplier;
  const int32_t first_position, last_position;  // the last is before the first where the warp has no rows
  RowState<Tile::kRowTiles> state;
  float out[Tile::kRowTiles][Tile::kOutTiles][4] = {};

  __device__ WarpRows(const WarpQuery<Tile, T>& warp_query, const LogitRule& logit_rule, const Item& item, int warp_row)
      : query(warp_query),
        rule(logit_rule),
        multiplier(logit_rule.multiplier()),
        first_position(item.first_position + warp_row),
        last_position(item.first_position + min(warp_row + Tile::kWarpRows, item.num_queries) - 1) {
    state.clear();
  }

  // Whether any row sees any key of a step.
  __device__ bool see(int first_key) const {
    return first_position <= last_position && first_key <= last_position &&
           (rule.window < 0 || first_key + Tile::kStepKeys > first_position - rule.window + 1);
  }

  // Products become logits, up to the multiplier; those of keys that a row does not see become -inf.
  __device__ void make_logits(Scores& scores, int first_key) const {
    if (!rule.is_linear()) apply_rule(scores, rule, first_position, first_key);
    const bool is_cut = first_key + Tile::kStepKeys > first_position + 1 ||
                        (rule.window >= 0 && first_key <= last_position - rule.window);
    if (is_cut) hide_unseen(scores, rule.window, first_position, first_key);
  }

  // Takes a step into the sums; `scores` are logits.
  __device__ void fold(Scores& scores, uint32_t values) {
    float factors[Tile::kRowTiles][2];
    const bool moves = move_references(scores, multiplier, state, factors);
    weigh(scores, multiplier, state);
    Weights<Tile> weights;
    pack_weights<Tile, T>(scores, weights);
    if (__any_sync(0xffffffffu, moves)) scale_rows(factors, out);
    add_values<Tile, T>(weights, values, out);
  }

  // A tile of which every row sees every key, in steps: the products of one step with its keys keep the tensor cores
  // busy while the exponentials of the step before are taken.
  __device__ void fold_whole_tile(uint32_t keys, uint32_t values) {
    constexpr int kNumSteps = Tile::kKeys / Tile::kStepKeys, kStepBytes = Tile::kStepKeys * Tile::kRowBytes;
    Scores scores[2];
    score_tile<Tile, T>(query, keys, scores[0]);
#pragma unroll
    for (int step = 0; step < kNumSteps; ++step) {
      if (Tile::kOverlaps && step + 1 < kNumSteps) {
        score_tile<Tile, T>(query, keys + (step + 1) * kStepBytes, scores[(step + 1) & 1]);
      }
      fold(scores[step & 1], values + step * kStepBytes);
      if (!Tile::kOverlaps && step + 1 < kNumSteps) {
        score_tile<Tile, T>(query, keys + (step + 1) * kStepBytes, scores[(step + 1) & 1]);
      }
    }
  }

  // Any other tile.
  __device__ void fold_tile(uint32_t keys, uint32_t values, int first_key) {
    constexpr int kStepBytes = Tile::kStepKeys * Tile::kRowBytes;
#pragma unroll 1
    for (int step = 0; step < Tile::kKeys / Tile::kStepKeys; ++step, first_key += Tile::kStepKeys) {
      if (!see(first_key)) continue;
      Scores scores;
      score_tile<Tile, T>(query, keys + step * kStepBytes, scores);
      make_logits(scores, first_key);
      fold(scores, values + step * kStepBytes);
    }
  }

  __device__ bool see_all(int first_key) const {
    return rule.is_linear() && first_position <= last_position && first_key + Tile::kKeys <= first_position + 1 &&
           (rule.window < 0 || first_key > last_position - rule.window);
  }
};

template <typename Tile, typename T, bool kIs8Bit>
__device__ inline void attend(const PagedAttentionParams& p, const Item& item, int32_t first_page, uint8_t* shared) {
  const int warp_row = (threadIdx.x >> 5) * Tile::kWarpRows;
  uint8_t* const query_rows = shared + warp_row * Tile::kRowBytes;
  WarpQuery<Tile, T> query(shared_address(query_rows));
  TileStream<Tile, T, kIs8Bit> stream(p, item, shared + Tile::kQueryBytes);
  query.start_load(p, item, warp_row);
  stream.open(first_page);
  const float key_scale = kIs8Bit && p.key_scale != nullptr ? p.key_scale[item.kv_head] : 1.0f;
  const LogitRule rule{p.scale * key_scale, p.soft_cap, p.alibi_slopes != nullptr ? p.alibi_slopes[item.head] : 0.0f,
                       p.window};
  WarpRows<Tile, T> rows(query, rule, item, warp_row);
  for (int first_key = item.begin_key; first_key < item.end_key; first_key += Tile::kKeys) {
    uint32_t keys, values;
    stream.advance(keys, values);
    if (rows.see_all(first_key)) {
      rows.fold_whole_tile(keys, values);
    } else {
      rows.fold_tile(keys, values, first_key);
    }
  }
  if (warp_row < item.num_queries) {
    const float value_scale = kIs8Bit && p.value_scale != nullptr ? p.value_scale[item.kv_head] : 1.0f;
    write_rows<Tile, T>(p, item, warp_row, value_scale, rows.state, rows.out, query_rows);
  }
}

// Items in the plan's order, costliest first; every second turn runs backwards over the blocks, so that the block with
// the costliest item of one turn gets the cheapest of the next. The first warp, whose rows see the fewest keys, looks
// the next item up while the others finish.
template <typename Tile, typename T, bool kIs8Bit>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    prefill_mma_kernel(const __grid_constant__ PagedAttentionParams p, const int32_t* __restrict__ plan) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Item items[2];
  __shared__ int32_t first_pages[2][32];
  const int num_items = reinterpret_cast<const PlanHeader*>(plan)->num_prefill_tiles * p.num_query_heads;
  int next = blockIdx.x;
  for (int turn = 0;; ++turn) {
    const int place = turn & 1;
    if (threadIdx.x < 32 && next < num_items) {
      const Item item = find_item<Tile>(p, plan, next);
      first_pages[place][threadIdx.x] = find_page(p, item, item.begin_key + 8 * threadIdx.x);
      if (threadIdx.x == 0) items[place] = item;
    }
    __syncthreads();
    if (next >= num_items) return;
    attend<Tile, T, kIs8Bit>(p, items[place], first_pages[place][threadIdx.x & 31], shared);
    next = (turn + 1) * gridDim.x + (place == 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
}

}  // namespace pagemill::cuda::mma
