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
template <typename Tile, typename T, bool kIs8Bit>
class WarpRows {
 public:
  __device__ WarpRows(const PagedAttentionParams& p, const Item& item, uint8_t* query_rows, int warp_row)
      : params_(p),
        item_(item),
        query_(shared_address(query_rows)),
        first_position_(item.first_position + warp_row),
        last_position_(item.first_position + min(warp_row + Tile::kWarpRows, item.num_queries) - 1) {
    query_.start_load(p, item, warp_row);
    state_.clear();
    const float scale = p.scale * key_scale();
    is_linear_ = p.soft_cap == 0.0f && p.alibi_slopes == nullptr && scale > 0.0f;
    multiplier_ = is_linear_ ? scale * kLog2E : 1.0f;
  }

  // Takes a tile of keys and values into the sums.
  __device__ void fold(uint32_t keys, uint32_t values, int first_key) {
    if (!sees_any(first_key)) return;
    // The first tile moves the references in any case.
    if (first_key > item_.begin_key && sees_all(first_key) && fold_as_it_is(keys, values)) return;
    fold_carefully(keys, values, first_key);
  }

  __device__ void write(int warp_row, uint8_t* staging) const {
    const float value_scale = kIs8Bit && params_.value_scale != nullptr ? params_.value_scale[item_.kv_head] : 1.0f;
    if (first_position_ <= last_position_) {
      write_rows<Tile, T>(params_, item_, warp_row, value_scale, state_, out_, staging);
    }
  }

 private:
  using Scores = float[Tile::kRowTiles][Tile::kColumnTiles][4];

  __device__ float key_scale() const {
    return kIs8Bit && params_.key_scale != nullptr ? params_.key_scale[item_.kv_head] : 1.0f;
  }

  // Whether any row sees any key of the tile; false where the warp has no rows.
  __device__ bool sees_any(int first_key) const {
    const int window = params_.window;
    return first_position_ <= last_position_ && first_key <= last_position_ &&
           (window < 0 || first_key + Tile::kKeys > first_position_ - window + 1);
  }

  // Whether every row sees every key.
  __device__ bool sees_all(int first_key) const {
    return first_key + Tile::kKeys <= first_position_ + 1 &&
           (params_.window < 0 || first_key > last_position_ - params_.window);
  }

  // For tiles that every row sees whole: with the references as they are, and without a look at the largest score.
  // False, and nothing done, where a reference would have to move: seldom, after the first tiles.
  __device__ bool fold_as_it_is(uint32_t keys, uint32_t values) {
    if (!is_linear_) return false;
    Scores scores;
    score_tile<Tile, T>(query_, keys, scores);
    float sums[Tile::kRowTiles][2];
    weigh(scores, multiplier_, state_.reference, sums);
    if (!__all_sync(0xffffffffu, state_.keeps_references(sums))) return false;
    state_.add(sums);
    Weights<Tile> weights;
    pack_weights<Tile, T>(scores, weights);
    add_values<Tile, T>(weights, values, out_);
    return true;
  }

  __device__ void fold_carefully(uint32_t keys, uint32_t values, int first_key) {
    Scores scores;
    score_tile<Tile, T>(query_, keys, scores);
    if (!is_linear_) {
      const float slope = params_.alibi_slopes != nullptr ? params_.alibi_slopes[item_.head] : 0.0f;
      const LogitRule rule{params_.scale * key_scale(), params_.soft_cap, slope};
      apply_rule(scores, rule, first_position_, first_key);
    }
    if (!sees_all(first_key)) hide_unseen(scores, params_.window, first_position_, first_key);
    float factors[Tile::kRowTiles][2], references[Tile::kRowTiles][2], sums[Tile::kRowTiles][2];
    const bool moves = move_references(scores, multiplier_, state_, factors);
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A row that has seen no key yet: all its weights are 0.
        const float reference = state_.reference[r][half];
        references[r][half] = reference == -INFINITY ? 0.0f : reference;
      }
    }
    weigh(scores, multiplier_, references, sums);
    state_.add(sums);
    Weights<Tile> weights;
    pack_weights<Tile, T>(scores, weights);
    if (__any_sync(0xffffffffu, moves)) scale_rows(factors, out_);
    add_values<Tile, T>(weights, values, out_);
  }

  const PagedAttentionParams& params_;
  const Item& item_;
  WarpQuery<Tile, T> query_;
  const int32_t first_position_, last_position_;  // the last is before the first where the warp has no rows
  bool is_linear_;    // logits are products times a positive factor, which the exponent's multiplication takes in
  float multiplier_;  // that factor, in powers of two
  RowState<Tile::kRowTiles> state_;
  float out_[Tile::kRowTiles][Tile::kOutTiles][4] = {};
};

template <typename Tile, typename T, bool kIs8Bit>
__device__ inline void attend(const PagedAttentionParams& p, const Item& item, int32_t first_page, uint8_t* shared) {
  const int warp_row = (threadIdx.x >> 5) * Tile::kWarpRows;
  uint8_t* const query_rows = shared + warp_row * Tile::kRowBytes;
  TileStream<Tile, T, kIs8Bit> stream(p, item, shared + Tile::kQueryBytes);
  stream.open(first_page);
  WarpRows<Tile, T, kIs8Bit> rows(p, item, query_rows, warp_row);
  commit_copies();
  for (int first_key = item.begin_key; first_key < item.end_key; first_key += Tile::kKeys) {
    uint32_t keys, values;
    stream.advance(first_key, keys, values);
    rows.fold(keys, values, first_key);
  }
  rows.write(warp_row, query_rows);
}

// Items in the plan's order, costliest first; every second turn runs backwards over the blocks, so that the block with
// the costliest item of one turn gets the cheapest of the next. The first warp, whose rows see the fewest keys, looks
// the next item up while the others finish.
template <typename Tile, typename T, bool kIs8Bit>
__device__ inline void run_items(const PagedAttentionParams& p, const int32_t* plan) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ Item items[2];
  __shared__ int32_t first_pages[2][32];
  __shared__ int next_item;  // kept here while an item has all registers
  const int num_items = reinterpret_cast<const PlanHeader*>(plan)->num_prefill_tiles * p.num_query_heads;
  int index = blockIdx.x;
  for (int turn = 0; index < num_items; ++turn) {
    const int place = turn & 1;
    if (threadIdx.x < 32) {
      const Item item = find_item<Tile>(p, plan, index);
      first_pages[place][threadIdx.x] = find_page(p, item, item.begin_key + 8 * threadIdx.x);
      if (threadIdx.x == 0) items[place] = item;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      next_item = (turn + 1) * gridDim.x + (place == 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
    attend<Tile, T, kIs8Bit>(p, items[place], first_pages[place][threadIdx.x & 31], shared);
    index = next_item;
  }
}

template <typename Tile, typename T, bool kIs8Bit>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    prefill_mma_kernel(const __grid_constant__ PagedAttentionParams p, const int32_t* __restrict__ plan) {
#if defined(__CUDA_ARCH__)
  if constexpr ((static_cast<int>(chip_of(__CUDA_ARCH__ / 10)) & Tile::kChips) != 0) {
    run_items<Tile, T, kIs8Bit>(p, plan);
  } else {
    __trap();
  }
#endif
}

}  // namespace pagemill::cuda::mma
