// Rows that need few of their entries: greedy ones, and top-k with a small k. Two kernels, without clusters.
//
// list_entries_kernel: a block reads a span of a row once, into registers, and lists the entries that can be among the
// k largest of the row. With the largest entry of each thread known, as many threads as k have one of at least the k-th
// largest of those: a threshold that never lists too few, and of entries in no order lists few more than k.
//
// draw_listed_kernel: a block to a row joins the lists and draws. Rows that are not of this kind, and those whose list
// is too long (many equal entries), are left to the kernel that looks at everything.
#pragma once

#include <cfloat>

#include "sample_row.cuh"
#include "sample_span.cuh"

namespace pagemill::cuda::sampling {

constexpr int kMaxSpans = kWarpLanes;  // of a row
constexpr int kMaxListedTopK = 128;
constexpr int kSpanCandidates = 256;
constexpr int kListBuckets = 256;
static_assert(kListBuckets == kThreads && kMaxListedTopK <= kThreads);
// A threshold that only -inf does not reach.
constexpr float kLowestFinite = -FLT_MAX;

struct SpanResult {
  uint32_t count;   // of candidates; more than kSpanCandidates: the list is cut off
  float threshold;  // all entries from here on are listed; as many as are looked for, or all finite ones
  float largest;
  uint32_t is_bad;  // a NaN or +inf was seen
};

// In the workspace; nothing is kept from call to call.
struct ListedRows {
  uint32_t* num_others;  // rows left to the other kernel
  int32_t* others;       // [num_rows]
  SpanResult* spans;     // [num_rows, num_spans]
  uint64_t* candidates;  // [num_rows, num_spans, kSpanCandidates], as candidate_of() makes them
  int32_t num_spans;

  __device__ __forceinline__ void leave(int64_t row) const {
    others[atomicAdd(num_others, 1u)] = static_cast<int32_t>(row);
  }
};

// How many of the largest entries the row's token depends on; 0: more than are listed.
__device__ __forceinline__ int32_t entries_needed(const SampleParams& p, int64_t row) {
  const float temperature = row_value(p.temperature, row, 0.0f);
  const int32_t top_k = row_value(p.top_k, row, 0);
  if (is_adjusted(p, row)) return 0;
  if (temperature < kGreedyTemperature) return 1;
  return top_k > 0 && top_k <= kMaxListedTopK && top_k < p.vocab_size ? top_k : 0;
}

// Equal steps of value from `high` down to `low`.
struct ListBuckets {
  float high, scale, step;

  __device__ __forceinline__ ListBuckets(float from, float to) : high(from) {
    constexpr float kSteps = static_cast<float>(kListBuckets) - 0.01f;
    const float range = from - to;
    scale = range > 0.0f ? kSteps / range : 0.0f;
    step = range / kSteps;
  }
  __device__ __forceinline__ int of(float x) const {
    return min(static_cast<int>((high - x) * scale), kListBuckets - 1);
  }
};

// The first bucket up to which there are `wanted` entries, or the last one. Every warp finds it by itself.
__device__ __forceinline__ int find_bucket(const uint32_t (&counts)[kListBuckets], uint32_t wanted) {
  constexpr int kOfLane = kListBuckets / kWarpLanes;
  const int lane = threadIdx.x % kWarpLanes;
  uint32_t own[kOfLane];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) own[i] = counts[lane * kOfLane + i], sum += own[i];
  uint32_t inclusive = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpLanes; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  const uint32_t passing = __ballot_sync(0xffffffffu, inclusive >= wanted);
  uint32_t running = inclusive - sum;
  int bucket = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    running += own[i];
    bucket += running < wanted;
  }
  if (passing == 0) return kListBuckets - 1;
  const int owner = __ffs(passing) - 1;
  return owner * kOfLane + __shfl_sync(0xffffffffu, bucket, owner);
}

struct ListShared {
  uint32_t counts[kListBuckets];
  uint32_t high_keys[kWarps], low_keys[kWarps], num_finite[kWarps];
  uint32_t num_listed;
};

// Of the largest entries of all threads.
struct ThreadMaxima {
  float high, low;  // low: of the finite ones
  uint32_t num_finite;
  bool has_bad;
};

// Clears the counts. A barrier follows what it reads of `shared`, not what it writes.
__device__ __forceinline__ ThreadMaxima combine_maxima(float largest, ListShared& shared) {
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  const bool is_finite = largest > -kInfinity;
  const uint32_t key = ordered_key(largest);
  const uint32_t high = __reduce_max_sync(0xffffffffu, is_finite ? key : 0u);
  const uint32_t low = __reduce_min_sync(0xffffffffu, is_finite ? key : UINT32_MAX);
  const uint32_t finite = __ballot_sync(0xffffffffu, is_finite);
  if (lane == 0) {
    shared.high_keys[warp] = high;
    shared.low_keys[warp] = low;
    shared.num_finite[warp] = __popc(finite);
  }
  shared.counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_listed = 0;
  const bool has_bad = __syncthreads_or(largest != largest) != 0;
  const int of = lane % kWarps;
  const uint32_t all_high = __reduce_max_sync(0xffffffffu, shared.high_keys[of]);
  const uint32_t all_low = __reduce_min_sync(0xffffffffu, shared.low_keys[of]);
  const uint32_t all_finite = __reduce_add_sync(0xffffffffu, lane < kWarps ? shared.num_finite[of] : 0u);
  if (all_finite == 0) return {-kInfinity, -kInfinity, 0, has_bad};
  return {value_of_key(all_high), value_of_key(all_low), all_finite, has_bad};
}

// A value that at least `needed` threads' largest entries reach, or kLowestFinite where there are not so many.
__device__ __forceinline__ float find_threshold(float largest, const ThreadMaxima& maxima, uint32_t needed,
                                                ListShared& shared) {
  if (maxima.num_finite < needed) return kLowestFinite;
  const ListBuckets buckets(maxima.high, maxima.low);
  if (largest > -kInfinity) atomicAdd(&shared.counts[buckets.of(largest)], 1u);
  __syncthreads();
  const int bucket = find_bucket(shared.counts, needed);
  // Where the bucket ends, less what rounding may have moved.
  constexpr float kRounding = 1e-6f;
  const float end = maxima.high - static_cast<float>(bucket + 1) * buckets.step -
                    kRounding * (fabsf(maxima.high) + fabsf(maxima.low));
  return fmaxf(maxima.low, end);
}

template <typename T>
__device__ __forceinline__ void list_entries(const SampleParams& p, const ListedRows& listed) {
  __shared__ ListShared shared;
  const auto num_spans = static_cast<uint32_t>(listed.num_spans);
  const uint32_t row = blockIdx.x / num_spans, span = blockIdx.x % num_spans;
  const int32_t needed = entries_needed(p, row);
  if (needed == 0) return;
  SpanEntries<T> entries;
  entries.load(static_cast<const T*>(p.logits) + row * p.logits_stride, static_cast<int32_t>(p.vocab_size),
               static_cast<int32_t>(span), listed.num_spans);
  const float largest = entries.largest();
  const ThreadMaxima maxima = combine_maxima(largest, shared);
  SpanResult& result = listed.spans[blockIdx.x];
  if (maxima.has_bad) {
    if (threadIdx.x == 0) result = {0, kLowestFinite, -kInfinity, 1};
    return;
  }
  const float threshold = find_threshold(largest, maxima, static_cast<uint32_t>(needed), shared);
  if (largest >= threshold) {
    uint64_t* list = listed.candidates + static_cast<int64_t>(blockIdx.x) * kSpanCandidates;
    entries.for_each_from(threshold, [&](float x, int32_t id) {
      const uint32_t place = atomicAdd(&shared.num_listed, 1u);
      if (place < kSpanCandidates) list[place] = candidate_of(x, id);
    });
  }
  __syncthreads();
  if (threadIdx.x == 0) result = {shared.num_listed, threshold, maxima.high, 0};
}

// The lists of a row's spans, joined. A warp knows of all.
class JoinedLists {
 public:
  __device__ __forceinline__ JoinedLists(const ListedRows& listed, int64_t row)
      : candidates_(listed.candidates + row * listed.num_spans * kSpanCandidates), num_spans_(listed.num_spans) {
    const int lane = threadIdx.x % kWarpLanes;
    SpanResult mine{0, kLowestFinite, -kInfinity, 0};
    if (lane < num_spans_) mine = listed.spans[row * num_spans_ + lane];
    count_ = mine.count;
    is_bad_ = __any_sync(0xffffffffu, mine.is_bad != 0);
    is_cut_ = __any_sync(0xffffffffu, mine.count > kSpanCandidates);
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    largest_ = combine_lanes(mine.largest, larger);
    threshold_ = combine_lanes(mine.threshold, larger);
  }

  __device__ __forceinline__ bool is_valid() const { return !is_bad_ && largest_ > -kInfinity; }
  __device__ __forceinline__ bool is_cut() const { return is_cut_; }
  __device__ __forceinline__ float largest() const { return largest_; }
  // One span alone has as many entries from here on as are looked for, so none below is among them.
  __device__ __forceinline__ float threshold() const { return threshold_; }

  // Whole warps: visit(candidate, is_there).
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    for (int span = warp; span < num_spans_; span += kWarps) {
      const uint32_t count = __shfl_sync(0xffffffffu, count_, span);
      for (uint32_t base = 0; base < count; base += kWarpLanes) {
        const bool is_there = base + lane < count;
        const uint64_t candidate = is_there ? candidates_[span * kSpanCandidates + base + lane] : UINT64_MAX;
        visit(candidate, is_there && candidate_value(candidate) >= threshold_);
      }
    }
  }

 private:
  const uint64_t* candidates_;
  int32_t num_spans_;
  uint32_t count_;  // of the lane's span
  bool is_bad_, is_cut_;
  float largest_, threshold_;
};

// The largest entry, of equal ones the first; to thread 0.
__device__ __forceinline__ int32_t first_of_largest(const JoinedLists& lists) {
  auto& of_warps = block_shared().candidates;
  uint64_t best = UINT64_MAX;
  lists.for_each([&](uint64_t candidate, bool is_there) { best = is_there ? min(best, candidate) : best; });
  const auto smaller = [](uint64_t a, uint64_t b) { return min(a, b); };
  best = combine_lanes(best, smaller);
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = best;
  __syncthreads();
  return candidate_id(combine_lanes(of_warps[threadIdx.x % kWarps], smaller));
}

// Leaves the `needed` largest entries, and few others, in the block's list; how many that are.
__device__ __forceinline__ uint32_t keep_largest(const JoinedLists& lists, uint32_t needed) {
  __shared__ uint32_t counts[kListBuckets];
  BlockShared& shared = block_shared();
  counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_candidates = 0;
  __syncthreads();
  const ListBuckets buckets(lists.largest(), lists.threshold());
  lists.for_each([&](uint64_t candidate, bool is_there) {
    if (is_there) atomicAdd(&counts[buckets.of(candidate_value(candidate))], 1u);
  });
  __syncthreads();
  const int last = find_bucket(counts, needed);
  lists.for_each([&](uint64_t candidate, bool is_there) {
    const bool is_kept = is_there && buckets.of(candidate_value(candidate)) <= last;
    const uint32_t kept = __ballot_sync(0xffffffffu, is_kept), lane = threadIdx.x % kWarpLanes;
    uint32_t place = 0;
    if (lane == 0 && kept != 0) place = atomicAdd(&shared.num_candidates, static_cast<uint32_t>(__popc(kept)));
    place = __shfl_sync(0xffffffffu, place, 0) + __popc(kept & ((1u << lane) - 1u));
    if (is_kept && place < kMaxCandidates) shared.candidates[place] = candidate;
  });
  __syncthreads();
  return shared.num_candidates;
}

// The token of a row that is valid and whose lists are whole; -1 where too many entries are equal. To thread 0.
__device__ __forceinline__ int32_t draw_from_lists(const SampleParams& p, int64_t row, const JoinedLists& lists,
                                                   int32_t needed) {
  if (row_value(p.temperature, row, 0.0f) < kGreedyTemperature) return first_of_largest(lists);
  const uint32_t count = keep_largest(lists, static_cast<uint32_t>(needed));
  if (count > kMaxCandidates) return -1;
  ListCuts cuts = cuts_of(p, row, lists.largest());
  // Where fewer are finite all of them survive.
  cuts.top_k = min(needed, static_cast<int32_t>(count));
  return draw_from_list(static_cast<int>(count), cuts, softmax_of(p, row, lists.largest()));
}

__device__ __forceinline__ void draw_listed(const SampleParams& p, const ListedRows& listed) {
  const int64_t row = blockIdx.x;
  const int32_t needed = entries_needed(p, row);
  if (needed == 0) {
    if (threadIdx.x == 0) listed.leave(row);
    return;
  }
  const JoinedLists lists(listed, row);
  int32_t id = 0;
  if (lists.is_valid()) id = lists.is_cut() ? -1 : draw_from_lists(p, row, lists, needed);
  if (threadIdx.x != 0) return;
  if (id < 0) {
    listed.leave(row);
  } else {
    p.out_ids[row] = id, p.out_status[row] = lists.is_valid() ? 0 : 1;
  }
}

}  // namespace pagemill::cuda::sampling
