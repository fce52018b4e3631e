// The decode kernel itself.
#pragma once

#include "attention_decode_join.cuh"

namespace pagemill::cuda::decode {

constexpr int kSmallSharedBytes = 99 * 1024;  // of a thread block on sm_86 and sm_89

// One warp's ring of tiles in flight. Each fill is two groups of copies, keys and values, be they empty.
template <typename C>
struct Ring {
  uint32_t memory;    // shared address of the warp's stages
  int32_t stage = 0;  // consumed next

  __device__ __forceinline__ Ring(const Shared<C>& shared, int warp)
      : memory(shared_address(shared.ring) + warp * C::kStages * C::kStageBytes) {}

  __device__ __forceinline__ uint32_t keys(int32_t of_stage) const { return memory + of_stage * C::kStageBytes; }
  __device__ __forceinline__ uint32_t values(int32_t of_stage) const { return keys(of_stage) + C::kTileBytes; }
  __device__ __forceinline__ int32_t after(int32_t of_stage) const {
    return of_stage + 1 == C::kStages ? 0 : of_stage + 1;
  }

  // The stage's former contents have been read by all lanes.
  __device__ __forceinline__ void fill(const Arguments& a, const Request& r, int32_t of_stage, int lane) const {
    const TileSource<C> source(a, r, lane);
    const bool is_whole = r.is_valid && r.low == 0 && r.high == kDecodeTileKeys;
    if (is_whole) {
      source.copy_whole(a.p.key_cache, keys(of_stage), lane);
    } else if (r.is_valid) {
      source.copy_seen(a.p.key_cache, r, keys(of_stage), lane);
    }
    commit_copies();
    if (is_whole) {
      source.copy_whole(a.p.value_cache, values(of_stage), lane);
    } else if (r.is_valid) {
      source.copy_seen(a.p.value_cache, r, values(of_stage), lane);
    }
    commit_copies();
  }

  // The next kTiles tiles have come. The ring is full of groups at that time.
  template <int kTiles>
  __device__ __forceinline__ void wait_keys() const {
    wait_copies<2 * (C::kStages - kTiles) + 1>();
    __syncwarp();
  }

  template <int kTiles>
  __device__ __forceinline__ void wait_values() const {
    wait_copies<2 * (C::kStages - kTiles)>();
    __syncwarp();
  }
};

// Computes on the next kTiles tiles, of which `tile` is the first, and refills their stages.
template <typename C, int kTiles>
__device__ __forceinline__ void step(const Arguments& a, const Walk& walk, const Queries<C>& queries, int32_t tile,
                                     Ring<C>& ring, Feed<C>& feed, Request& request, Accumulator<C>& o, int warp,
                                     int lane) {
  float s[kTiles][2][4];
  int32_t stages[kTiles];
  stages[0] = ring.stage;
#pragma unroll
  for (int i = 1; i < kTiles; ++i) stages[i] = ring.after(stages[i - 1]);
  ring.template wait_keys<kTiles>();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    scores<C>(queries, ring.keys(stages[i]), lane, s[i]);
    adjust<C>(a, queries, (walk.entry.first_tile + tile + i * C::kWarps) * kDecodeTileKeys, lane, s[i]);
  }
  weigh<C, kTiles>(a, queries, s, o);
  ring.template wait_values<kTiles>();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) add_values<C>(s[i], ring.values(stages[i]), lane, o);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    ring.fill(a, request, stages[i], lane);
    request = feed.prepare(a, warp);
  }
  ring.stage = ring.after(stages[kTiles - 1]);
}

// All segments of a range. Gives thread 0 the number of the thread block's claim of another range, where there may be
// one. It claims as late as the answer is still in time: an early claim would fix who does what before it is known who
// is fast.
template <typename C>
__device__ __forceinline__ int32_t run_range(const Arguments& a, const DecodeRange& range, int32_t range_index,
                                             int32_t num_ranges, int32_t max_rows, Ring<C>& ring, Feed<C>& feed,
                                             Request& request, Shared<C>& shared, int warp, int lane) {
  const bool is_dynamic = num_ranges > static_cast<int32_t>(gridDim.x);
  int32_t claimed = 0;
  Walk walk;
  walk.start(range, feed.walk.piece_tiles);
  do {
    Queries<C> queries;
    if constexpr (Queries<C>::kInShared) __syncthreads();
    queries.load(a, walk, shared.values + warp * C::kJoinRows * C::kHeadSize, lane);
    Accumulator<C> o;
    o.clear();
    int32_t tile = walk.begin + warp;
    if constexpr (C::kStepTiles == 2) {
      for (; tile + C::kWarps < walk.end; tile += 2 * C::kWarps) {
        step<C, 2>(a, walk, queries, tile, ring, feed, request, o, warp, lane);
      }
    }
    for (; tile < walk.end; tile += C::kWarps) {
      step<C, 1>(a, walk, queries, tile, ring, feed, request, o, warp, lane);
    }
    if (is_dynamic && walk.left == 0 && threadIdx.x == 0) claimed = atomicAdd(a.counters + kDecodeMaxRanges, 1);
    finish_segment<C>(a, walk, range, range_index, max_rows, o, shared, warp, lane);
  } while (walk.next(a));
  return claimed;
}

template <typename C>
__device__ __forceinline__ void run_worker(const Arguments& a, char* memory) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Shared<C> shared(memory);
  const PlanHeader* header = reinterpret_cast<const PlanHeader*>(a.plan);
  int32_t range_index = static_cast<int32_t>(blockIdx.x);
  DecodeRange range = load_range(a.plan, range_index);
  const int32_t piece_tiles = __ldg(&header->piece_tiles), max_rows = __ldg(&header->max_rows);
  const int32_t num_ranges = __ldg(&header->num_ranges);
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    Feed<C> feed;
    feed.start(a, range, piece_tiles, warp);
    // A block id is read one copy ahead of its use.
    Request request = feed.prepare(a, warp);
    if (is_first) {
      wait_for_previous_kernels();
      let_next_kernel_launch();
      if (range.num_tiles == 0) return;
    }
    Ring<C> ring(shared, warp);
#pragma unroll 1
    for (int i = 0; i < C::kStages; ++i) {
      const Request next = feed.prepare(a, warp);
      ring.fill(a, request, i, lane);
      request = next;
    }
    const int32_t claimed =
        run_range<C>(a, range, range_index, num_ranges, max_rows, ring, feed, request, shared, warp, lane);
    if (num_ranges <= static_cast<int32_t>(gridDim.x)) return;
    __syncthreads();  // whether the segment's result was the last has been read
    if (threadIdx.x == 0) {
      *shared.message = static_cast<int32_t>(gridDim.x) + claimed;
      // Every worker claims until there is none left, so that there are as many claims as ranges.
      if (claimed == num_ranges - 1) a.counters[kDecodeMaxRanges] = 0;  // for the next launch
    }
    __syncthreads();
    range_index = *shared.message;
    if (range_index >= num_ranges) return;
    range = load_range(a.plan, range_index);
  }
}

// Where there are two rings, the kernel with the deep one is for sm_90 and later, the other for devices before.
template <typename C>
__host__ __device__ constexpr bool is_for_this_architecture() {
  if (C::kHasShallowRing) return true;
#if defined(__CUDA_ARCH__)
  return (C::kSharedBytes > kSmallSharedBytes) == (__CUDA_ARCH__ >= 900);
#else
  return true;
#endif
}

template <typename C, int kBlocksPerMultiprocessor>
__global__ void __launch_bounds__(C::kWarps * 32, kBlocksPerMultiprocessor)
    decode_kernel(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) char memory[];
  if constexpr (is_for_this_architecture<C>()) {
    run_worker<C>(a, memory);
  } else {
    __trap();
  }
}

}  // namespace pagemill::cuda::decode
