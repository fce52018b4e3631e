// Finding where top-k and top-p cut a row, without sorting it.
//
// Entries are counted into buckets by distance from the largest. The bucket where the cut must be follows from the
// counts (top-k), or from counts times the weight in the middle of each bucket (top-p). One walk then sums the weights
// above it exactly and gathers its entries, which are few, for sorting. Where they are too many, the bucket is divided
// again, by the bits of its values; where the estimate was wrong, it is corrected by the exact sum and tried again.
#pragma once

#include "sample_buckets.cuh"

namespace pagemill::cuda::sampling {

constexpr int kEntriesPerThread = kMaxCandidates / kThreads;
constexpr int kRankedEntries = 128;
static_assert(kRankedEntries <= kThreads);
constexpr int kBucketsPerThread = kBuckets / kThreads;
// Nats beyond which weights no longer matter to top-p (e^-32 of the largest), and logits to which top-k looks at first.
constexpr float kReachNats = 32.0f;
constexpr float kReachLogits = 48.0f;
// Relative error of the estimated mass that a complete list makes up for.
constexpr double kEstimateError = 0.01;

// What a walk over all entries finds out about a window.
struct Measure {
  double mass_above = 0.0, mass_inside = 0.0, mass_total = 0.0;  // left 0 where no weights are asked for
};
struct Extent {
  uint32_t count = 0;  // entries inside
  uint32_t low_key = UINT32_MAX, high_key = 0;
};

// The leading block's list: pairs of (value descending, index ascending) in one number.
__device__ __forceinline__ uint64_t candidate_of(float x, int32_t id) {
  return (static_cast<uint64_t>(~ordered_key(x)) << 32) | static_cast<uint32_t>(id);
}
__device__ __forceinline__ float candidate_value(uint64_t candidate) {
  return value_of_key(~static_cast<uint32_t>(candidate >> 32));
}
__device__ __forceinline__ int32_t candidate_id(uint64_t candidate) { return static_cast<int32_t>(candidate); }

// Sorts the first `count` candidates, ascending. All threads of the block.
__device__ __noinline__ void sort_list(int count) {
  auto& list = block_shared().candidates;
  if (count <= kRankedEntries) {
    // Few: each thread counts what comes before its entry.
    __syncthreads();
    const int place = threadIdx.x;
    const uint64_t mine = place < count ? list[place] : UINT64_MAX;
    int rank = 0;
    if (place < count) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) rank += list[i] < mine;
    }
    __syncthreads();
    if (place < count) list[rank] = mine;
    __syncthreads();
    return;
  }
  int padded = 2 * kWarpLanes;
  while (padded < count) padded *= 2;
  __syncthreads();
  for (int i = count + threadIdx.x; i < padded; i += kThreads) list[i] = UINT64_MAX;
  __syncthreads();
  for (int run = 2; run <= padded; run *= 2) {
    for (int stride = run / 2; stride > 0; stride /= 2) {
      for (int pair = threadIdx.x; pair < padded / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const uint64_t a = list[low], b = list[high];
        if ((a > b) == ((low & run) == 0)) list[low] = b, list[high] = a;
      }
      // A warp's 32 pairs stay inside 64 entries while strides are short.
      if (stride > kWarpLanes || (stride == 1 && run > kWarpLanes)) {
        __syncthreads();
      } else {
        __syncwarp();
      }
    }
  }
  __syncthreads();
}

// What was found. Either a list in the first block that holds the cut, or a single value with more entries than a list.
struct Selection {
  bool has_cut = false;      // false: all entries survive
  bool is_list = false;      // else all entries around the cut equal `value`
  bool is_complete = false;  // the list holds all entries above the cut as well
  float value = 0.0f;
  uint32_t count = 0;                     // of the list, or of entries that equal `value`
  uint32_t count_above = 0;               // by count: entries above those
  double mass_above = 0.0, wanted = 0.0;  // by mass
};

template <bool kResident, typename By>
class Selector {
 public:
  __device__ __forceinline__ Selector(Team& team, const Slice<kResident>& slice, const Goal& goal,
                                      const Softmax& softmax)
      : team_(team), slice_(slice), goal_(goal), softmax_(softmax) {}

  // `reach`: distance from the largest entry that the buckets span.
  __device__ __noinline__ Selection select(float reach) {
    constexpr float kSteps = static_cast<float>(kBuckets - 2);
    const LinearBuckets linear{softmax_.largest, reach > 0.0f ? kSteps / reach : 0.0f,
                               reach > 0.0f ? reach / kSteps : 0.0f};
    Selection selection;
    Extent extent;
    if (look(linear, true, selection, extent)) return selection;
    while (extent.low_key < extent.high_key) {
      if (look(divide_keys(extent.low_key, extent.high_key, Taken{goal_}), false, selection, extent)) return selection;
    }
    selection.value = value_of_key(extent.high_key);
    selection.count = extent.count;
    return selection;
  }

 private:
  // One division. True when the selection is final, else `extent` is what to divide next.
  template <typename Buckets>
  __device__ bool look(const Buckets& buckets, bool is_first_look, Selection& selection, Extent& extent) {
    // Where the cut can be. Nothing outside a divided range is looked at again.
    int lowest = 0, highest = is_first_look ? kBuckets - 1 : kBuckets - 2;
    double correction = 0.0;  // of estimates, by exact sums
    for (;;) {
      count(buckets);
      const Window window = choose_window(buckets, is_first_look, selection, correction, lowest, highest);
      const bool gathers = window.count <= kMaxCandidates;
      const Measure measure = walk(window, gathers, extent);
      selection.has_cut = true;
      selection.count_above = window.count_above;
      if constexpr (By::kNeedsMass) {
        if (!knows_total_) {
          knows_total_ = true;
          selection.wanted = goal_.share * measure.mass_total;
        }
        selection.mass_above = measure.mass_above;
        if (measure.mass_above >= selection.wanted && window.first > lowest) {
          correction = measure.mass_above - window.estimate_above;
          highest = window.first - 1;
          continue;
        }
        if (measure.mass_above + measure.mass_inside < selection.wanted && window.last < highest) {
          correction = measure.mass_above + measure.mass_inside - window.estimate_end;
          lowest = window.last + 1;
          continue;
        }
      } else if (window.count_above + extent.count < goal_.count) {
        selection.has_cut = false;
        return true;
      }
      selection.is_list = gathers;
      selection.is_complete = is_first_look && window.first == 0;
      selection.count = extent.count;
      base_count_ = window.count_above;
      base_mass_ = measure.mass_above;
      return gathers;
    }
  }

  template <typename Buckets>
  __device__ __forceinline__ void count(const Buckets& buckets) {
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) block_shared().counts[i] = 0;
    __syncthreads();
    // Copies, so that the walk finds all in registers.
    const Buckets own_buckets = buckets;
    const float floor = goal_.floor;
    const Slice<kResident> slice = slice_;
    slice.template for_each_pack<2>([=](const float (&x)[kSlicePack], int32_t id) {
#pragma unroll
      for (int e = 0; e < kSlicePack; ++e) {
        const float counted = By::kNeedsMass && x[e] < floor ? -kInfinity : x[e];
        atomicAdd(&block_shared().counts[own_buckets.count_at(counted, id + e)], 1u);
      }
    });
    // Each block sums its share of the buckets into the first block's.
    team_.barrier();
    const int share = kBuckets / static_cast<int>(team_.size());
    for (int i = threadIdx.x; i < share && team_.size() > 1; i += kThreads) {
      const int bucket = static_cast<int>(team_.rank()) * share + i;
      uint32_t counts[kMaxTeam];  // read all before any is used
#pragma unroll
      for (uint32_t rank = 0; rank < kMaxTeam; ++rank) {
        counts[rank] = rank < team_.size() ? team_.shared_of(rank).counts[bucket] : 0;
      }
      uint32_t sum = 0;
#pragma unroll
      for (uint32_t rank = 0; rank < kMaxTeam; ++rank) sum += counts[rank];
      team_.shared_of(0).counts[bucket] = sum;
    }
    team_.barrier();
  }

  template <typename Buckets>
  __device__ __forceinline__ Window choose_window(const Buckets& buckets, bool is_first_look,
                                                  const Selection& selection, double correction, int lowest,
                                                  int highest) {
    if (team_.is_first()) {
      find_edges(buckets, selection, correction, lowest, highest);
      __syncthreads();
      if (threadIdx.x < kWarpLanes) {
        Window window = window_of_edges(is_first_look);
        window.low_value = window.last == kRest ? -kInfinity : buckets.least_of(window.last);
        window.above_value = buckets.least_above(window.first);
        team_.publish(&BlockShared::window, window);
        if (threadIdx.x == 0) block_shared().num_candidates = 0;
      }
    }
    team_.barrier();
    return block_shared().window;
  }

  // The buckets where the running count or mass passes the goal: edges[0], and, by mass, where it passes a little more:
  // edges[1].
  template <typename Buckets>
  __device__ __forceinline__ void find_edges(const Buckets& buckets, const Selection& selection, double correction,
                                             int lowest, int highest) {
    uint32_t counts[kBucketsPerThread];
    uint32_t count_sum = 0;
#pragma unroll
    for (int i = 0; i < kBucketsPerThread; ++i) {
      const int bucket = threadIdx.x * kBucketsPerThread + i;
      counts[i] = bucket == kRest ? 0 : block_shared().counts[bucket];
      count_sum += counts[i];
    }
    const auto count_scan = scan_threads(count_sum, &BlockShared::warp_counts);
    uint32_t count_before = base_count_ + count_scan.before;
    if (threadIdx.x == 0) block_shared().total_count = base_count_ + count_scan.total;
    if constexpr (By::kNeedsMass) {
      double masses[kBucketsPerThread];
      double mass_sum = 0.0;
#pragma unroll
      for (int i = 0; i < kBucketsPerThread; ++i) {
        const float weight = softmax_(buckets.middle(threadIdx.x * kBucketsPerThread + i));
        masses[i] = static_cast<double>(counts[i]) * static_cast<double>(weight);
        mass_sum += masses[i];
      }
      const auto mass_scan = scan_threads(mass_sum, &BlockShared::warp_masses);
      const double total = base_mass_ + mass_scan.total;
      const double target = knows_total_ ? selection.wanted - correction : goal_.share * total;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        find_edge(e, e == 0 ? target : target + kEstimateError * fabs(target - base_mass_), counts, masses,
                  count_before, base_mass_ + mass_scan.before, total, lowest, highest);
      }
    } else {
      find_edge(0, goal_.count, counts, counts, count_before, count_before, base_count_ + count_scan.total, lowest,
                highest);
    }
    __syncthreads();
  }

  // amounts: counts or masses of the thread's buckets; before: of all larger buckets.
  template <typename Amount>
  __device__ __forceinline__ void find_edge(int edge, Amount target, const uint32_t (&counts)[kBucketsPerThread],
                                            const Amount (&amounts)[kBucketsPerThread], uint32_t count_before,
                                            Amount before, Amount total, int lowest, int highest) {
    Edge& found = block_shared().edges[edge];
    // Where no bucket passes: what was not counted does, or nothing needs to.
    const bool is_past_all = target > total;
    if (threadIdx.x == 0) {
      const auto all = static_cast<double>(is_past_all ? total : before);
      found = {is_past_all ? kRest : 0, is_past_all ? block_shared().total_count : base_count_, all, all};
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBucketsPerThread; ++i) {
      const int bucket = threadIdx.x * kBucketsPerThread + i;
      const Amount end = before + amounts[i];
      const bool passes = before < target && end >= target && bucket >= lowest && bucket <= highest;
      // Where exact sums have shut out buckets, the nearest that is left.
      const bool is_clamped = (bucket == lowest && before >= target && lowest > 0) ||
                              (bucket == highest && end < target && highest < kRest);
      if (passes || is_clamped) found = {bucket, count_before, static_cast<double>(before), static_cast<double>(end)};
      count_before += counts[i];
      before = end;
    }
  }

  // One thread. From the largest entry on if the list has room for it, then rather a little more than too little; else
  // one bucket.
  __device__ __forceinline__ Window window_of_edges(bool is_first_look) const {
    const BlockShared& s = block_shared();
    const Edge narrow = s.edges[0];
    const auto end_count = [&](const Edge& edge) {  // entries up to and with that bucket
      return edge.bucket == kRest ? kUnknownCount : edge.count_before + s.counts[edge.bucket];
    };
    if constexpr (By::kNeedsMass) {
      Edge wide = s.edges[1];
      uint32_t end = end_count(wide);
      if (wide.bucket == kRest && narrow.bucket < kRest) wide.bucket = kRest - 1, end = s.total_count;
      if (is_first_look && end <= kMaxCandidates) return {0, wide.bucket, 0.0f, 0.0f, end, 0, 0.0, wide.mass_end};
    }
    const uint32_t end = end_count(narrow);
    if (is_first_look && end <= kMaxCandidates) return {0, narrow.bucket, 0.0f, 0.0f, end, 0, 0.0, narrow.mass_end};
    const uint32_t count = end == kUnknownCount ? kUnknownCount : end - narrow.count_before;
    return {narrow.bucket, narrow.bucket, 0.0f, 0.0f, count, narrow.count_before, narrow.mass_before, narrow.mass_end};
  }

  __device__ __forceinline__ Measure walk(const Window& window, bool gathers, Extent& extent) {
    Measure measure;
    Extent mine;
    BlockShared& first = team_.shared_of(0);
    const Taken takes{goal_};
    const Softmax softmax = softmax_;
    const float low_value = window.low_value, above_value = window.above_value;
    const Slice<kResident> slice = slice_;
    slice.template for_each_pack<By::kNeedsMass ? 1 : 4>([&](const float (&x)[kSlicePack], int32_t id) {
      if constexpr (By::kNeedsMass) {
        float weights[kSlicePack];
#pragma unroll
        for (int e = 0; e < kSlicePack; ++e) weights[e] = softmax(x[e]);
#pragma unroll
        for (int e = 0; e < kSlicePack; ++e) {
          const double weight = static_cast<double>(x[e] >= takes.goal.floor ? weights[e] : 0.0f);
          measure.mass_total += weight;
          if (x[e] >= above_value) measure.mass_above += weight;
        }
      }
      if (fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])) < low_value) return;
#pragma unroll
      for (int e = 0; e < kSlicePack; ++e) {
        if (x[e] < low_value || x[e] >= above_value || !takes(x[e], id + e)) continue;
        if constexpr (By::kNeedsMass) measure.mass_inside += static_cast<double>(softmax(x[e]));
        const uint32_t key = ordered_key(x[e]);
        mine.count += 1;
        mine.low_key = min(mine.low_key, key);
        mine.high_key = max(mine.high_key, key);
        if (gathers) {
          const uint32_t place = atomicAdd(&first.num_candidates, 1u);
          if (place < kMaxCandidates) first.candidates[place] = candidate_of(x[e], id + e);
        }
      }
    });
    if constexpr (By::kNeedsMass) {
      measure = team_.all_reduce(measure, Measure{}, [](const Measure& a, const Measure& b) {
        return Measure{a.mass_above + b.mass_above, a.mass_inside + b.mass_inside, a.mass_total + b.mass_total};
      });
    }
    if (!gathers) {
      extent = team_.all_reduce(mine, Extent{}, [](const Extent& a, const Extent& b) {
        return Extent{a.count + b.count, min(a.low_key, b.low_key), max(a.high_key, b.high_key)};
      });
    } else {
      extent.count = window.count;
      // The list is complete after a barrier.
      if constexpr (!By::kNeedsMass) team_.barrier();
    }
    return measure;
  }

  Team& team_;
  const Slice<kResident>& slice_;
  const Goal goal_;
  const Softmax softmax_;
  bool knows_total_ = false;
  uint32_t base_count_ = 0;  // above what is being divided
  double base_mass_ = 0.0;
};

}  // namespace pagemill::cuda::sampling
