// The producer warps: one takes work items and copies queries and keys into shared memory, one copies values.
#pragma once

#include "attention_wgmma_ptx.cuh"
#include "attention_wgmma_traits.cuh"

namespace pagemill::cuda::wgmma {

// Gives out the items (tile, query head) in the order of the plan, costliest first. Query heads are taken in rounds of
// heads_per_round, so that the keys and values of a round stay in the L2 cache while all tiles pass over them.
class WorkQueue {
 public:
  __device__ __forceinline__ explicit WorkQueue(const KernelParams& params)
      : params_(params),
        num_tiles_(reinterpret_cast<const PlanHeader*>(params.plan)->num_prefill_tiles),
        tiles_(reinterpret_cast<const PrefillTile*>(params.plan +
                                                    reinterpret_cast<const PlanHeader*>(params.plan)->prefill_offset)),
        index_(static_cast<int32_t>(blockIdx.x)),
        pass_(0) {}

  // All lanes get the same; num_queries is 0 after the last item.
  __device__ __forceinline__ WorkItem next(int lane) {
    WorkItem item{};
    const int32_t num_items = num_tiles_ * params_.num_query_heads;
    if (index_ >= num_items) return item;
    read(item);
    advance(lane, num_items);
    return item;
  }

 private:
  // A sequence whose slot lies outside the table gets an item that reads no page and stores nothing.
  __device__ __forceinline__ void read(WorkItem& item) const {
    const int32_t per_round = num_tiles_ * params_.heads_per_round;
    const int32_t round = index_ / per_round, in_round = index_ - round * per_round;
    const int32_t first_head = round * params_.heads_per_round;
    const int32_t heads = min(params_.heads_per_round, params_.num_query_heads - first_head);
    const int32_t tile_index = in_round / heads;
    const int4 numbers = __ldg(reinterpret_cast<const int4*>(tiles_) + tile_index);
    const PrefillTile tile{numbers.x, numbers.y, numbers.z, numbers.w};
    const int32_t first_row = __ldg(params_.query_start + tile.seq);
    const int32_t slot = params_.seq_slots != nullptr ? __ldg(params_.seq_slots + tile.seq) : tile.seq;
    item.head = first_head + in_round - tile_index * heads;
    item.token = first_row + tile.first_query;
    item.num_queries = tile.num_queries;
    item.first_position = tile.end_key - tile.num_queries;
    item.end_key = tile.end_key;
    item.begin_key = params_.window >= 0 ? max(0, item.first_position - params_.window + 1) : 0;
    item.table_row = slot;
    const bool is_valid = slot >= 0 && slot < params_.num_table_rows && item.begin_key < item.end_key;
    if (is_valid && item.num_queries > 0) return;
    item.num_queries = item.table_row = -1;
    item.begin_key = 0;
    item.end_key = 1;
  }

  __device__ __forceinline__ void advance(int lane, int32_t num_items) {
    const auto grid = static_cast<int32_t>(gridDim.x);
    if (params_.counter == nullptr) {
      // There and back over the thread blocks: who had the costliest item of one pass has the cheapest of the next.
      ++pass_;
      const auto block = static_cast<int32_t>(blockIdx.x);
      index_ = pass_ * grid + (pass_ % 2 == 0 ? block : grid - 1 - block);
      return;
    }
    int32_t taken = 0;
    if (lane == 0) {
      taken = atomicAdd(params_.counter, 1);
      // As many are added as there are items; the last one leaves the counter as it was found.
      if (taken == num_items - 1) *params_.counter = 0;
    }
    index_ = grid + __shfl_sync(0xffffffff, taken, 0);
  }

  const KernelParams& params_;
  const int32_t num_tiles_;
  const PrefillTile* const tiles_;
  int32_t index_, pass_;
};

// Copies pages into the stages of K or of V. What lies outside the cache is filled with zeros by the copy.
template <class Traits>
class PageCopier {
 public:
  __device__ __forceinline__ PageCopier(const KernelParams& params, const CUtensorMap& map, uint32_t full,
                                        uint32_t empty, uint32_t memory, int lane)
      : params_(params),
        map_(map),
        full_(full),
        empty_(empty),
        memory_(memory + lane * params.box_rows * Traits::kRowBytes),
        first_row_(lane * params.box_rows),
        lane_(lane),
        offset_mask_((1 << params.block_shift) - 1),
        groups_shift_(params.block_shift - 3) {}

  // Begins with the last key tile of an item.
  __device__ __forceinline__ void begin(const WorkItem& item) {
    table_ = params_.block_tables + item.table_row * params_.block_table_stride;
    num_pages_ = item.table_row >= 0 ? params_.max_blocks : 0;
    begin_key_ = item.begin_key;
    end_key_ = item.end_key;
    kv_head_ = item.head / params_.group;
    tile_ = (item.end_key - 1) / Traits::kKeyTile;
    block_ = find_block(tile_);
  }

  __device__ __forceinline__ int tile() const { return tile_; }

  // Copies the current key tile and goes on to the one before it. The latter's blocks are looked up ahead.
  __device__ __forceinline__ void copy() {
    const int32_t key = tile_ * Traits::kKeyTile + first_row_;
    const bool is_seen = is_seen_key(key);
    const int32_t block = block_;
    --tile_;
    block_ = find_block(tile_);
    int32_t group = ((block * params_.num_kv_heads + kv_head_) << groups_shift_) + ((key & offset_mask_) >> 3);
    if (block < 0) group = -1;
    const uint32_t num_boxes = __popc(__ballot_sync(0xffffffff, is_seen));
    barrier_wait(empty_ + place_.index * 8, place_.parity ^ 1);
    const uint32_t barrier = full_ + place_.index * 8;
    if (lane_ == 0) barrier_arrive_expect(barrier, num_boxes * params_.box_rows * Traits::kRowBytes);
    __syncwarp();
    const uint32_t to = memory_ + place_.index * Traits::kStageBytes;
    if (is_seen) copy_box(to, map_, barrier, 0, 0, 0, group);
    __syncwarp();
    place_.advance();
  }

 private:
  __device__ __forceinline__ bool is_seen_key(int32_t key) const {
    return first_row_ < Traits::kKeyTile && key < end_key_ && key + params_.box_rows > begin_key_;
  }

  // Block of this lane's box; -1 where the box is not copied or the table does not reach so far.
  __device__ __forceinline__ int32_t find_block(int32_t tile) const {
    const int32_t key = tile * Traits::kKeyTile + first_row_, page = key >> params_.block_shift;
    return is_seen_key(key) && tile >= 0 && page < num_pages_ ? __ldg(table_ + page) : -1;
  }

  const KernelParams& params_;
  const CUtensorMap& map_;
  const uint32_t full_, empty_, memory_;
  const int32_t first_row_, lane_, offset_mask_, groups_shift_;
  const int32_t* table_ = nullptr;
  int64_t num_pages_ = 0;
  int32_t begin_key_ = 0, end_key_ = 0, kv_head_ = 0, tile_ = 0, block_ = -1;
  RingPlace<Traits::kNumStages> place_;
};

// Warp 0 of the producers: takes work items and copies queries and keys.
template <class Traits>
__device__ __forceinline__ void produce_keys(const KernelParams& params, const CUtensorMap& query_map,
                                             const CUtensorMap& key_map, Barriers& barriers, uint32_t shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  WorkQueue queue(params);
  PageCopier<Traits> copier(params, key_map, shared_address(barriers.key_full), shared_address(barriers.key_empty),
                            shared + Traits::kNumQueries * Traits::kQueryBytes, lane);
  const uint32_t query_full = shared_address(barriers.query_full), query_empty = shared_address(barriers.query_empty);
  RingPlace<Traits::kNumQueries> place;
  WorkItem item = queue.next(lane);
  while (true) {
    barrier_wait(query_empty + place.index * 8, place.parity ^ 1);
    const uint32_t barrier = query_full + place.index * 8;
    if (lane == 0) {
      // The consumers have written outputs there by ordinary stores. They have no fence, which would wait for their
      // stores to memory too.
      fence_async_proxy();
      barriers.items[place.index] = item;
      if (item.num_queries == 0) {
        barrier_arrive(barrier);
      } else {
        barrier_arrive_expect(barrier, Traits::kQueryBytes);
        copy_box(shared + place.index * Traits::kQueryBytes, query_map, barrier, 0, item.token, 0, item.head);
      }
    }
    __syncwarp();
    if (item.num_queries == 0) return;
    place.advance();
    copier.begin(item);
    const int first_tile = item.begin_key / Traits::kKeyTile;
    // The next item is asked for late, so that the cheap ones at the end go to who is free.
    const int ask_tile = min(copier.tile(), first_tile + 2);
    while (copier.tile() >= first_tile) {
      const bool asks = copier.tile() == ask_tile;
      copier.copy();
      if (asks) item = queue.next(lane);
    }
  }
}

// Warp 1 of the producers: copies values of the items that warp 0 has taken.
template <class Traits>
__device__ __forceinline__ void produce_values(const KernelParams& params, const CUtensorMap& value_map,
                                               Barriers& barriers, uint32_t shared) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  PageCopier<Traits> copier(
      params, value_map, shared_address(barriers.value_full), shared_address(barriers.value_empty),
      shared + Traits::kNumQueries * Traits::kQueryBytes + Traits::kNumStages * Traits::kStageBytes, lane);
  const uint32_t query_full = shared_address(barriers.query_full), query_empty = shared_address(barriers.query_empty);
  RingPlace<Traits::kNumQueries> place;
  while (true) {
    barrier_wait(query_full + place.index * 8, place.parity);
    const WorkItem item = barriers.items[place.index];
    __syncwarp();
    if (item.num_queries == 0) return;
    if (lane == 0) barrier_arrive(query_empty + place.index * 8);
    place.advance();
    copier.begin(item);
    const int first_tile = item.begin_key / Traits::kKeyTile;
    while (copier.tile() >= first_tile) copier.copy();
  }
}

}  // namespace pagemill::cuda::wgmma
