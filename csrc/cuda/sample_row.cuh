// One row: from logits to a token, and log-probabilities.
//
// A block may leave at any time after a barrier: others read its shared memory between two barriers only, and what they
// write there is written before one.
#pragma once

#include "sample_draw.cuh"

namespace pagemill::cuda::sampling {

constexpr float kGreedyTemperature = 1e-5f;
constexpr float kLowestLogprob = -9999.0f;

// Of a row that is not greedy.
__device__ __forceinline__ Softmax softmax_of(const SampleParams& p, int64_t row, float largest) {
  return {largest, __fdiv_rn(1.0f, row_value(p.temperature, row, 0.0f))};
}
__device__ __forceinline__ ListCuts cuts_of(const SampleParams& p, int64_t row, float largest) {
  const int32_t top_k = row_value(p.top_k, row, 0);
  const float min_p = row_value(p.min_p, row, 0.0f);
  ListCuts cuts{top_k > 0 && top_k < p.vocab_size ? top_k : 0, static_cast<double>(row_value(p.top_p, row, 1.0f)), 0.0,
                -kInfinity,
                uniform_draw(row_value(p.seeds, row, uint64_t{0}), row_value(p.positions, row, int64_t{0}))};
  if (min_p > 0.0f) {
    const float log_min_p = static_cast<float>(log(static_cast<double>(min_p)));
    cuts.lowest = fminf(__fadd_rn(largest, __fmul_rn(log_min_p, row_value(p.temperature, row, 0.0f))), largest);
  }
  return cuts;
}

// Where a row's log-probabilities go; null: not wanted.
struct LogprobTargets {
  float* logprob;
  int32_t* rank;
  int32_t* top_ids;
  float* top_logprobs;
  int32_t num_top;

  __device__ __forceinline__ bool any() const { return logprob != nullptr || rank != nullptr || num_top > 0; }
};

// Params: SampleParams or TokenLogprobsParams.
template <typename Params>
__device__ __forceinline__ LogprobTargets logprob_targets(const Params& p, int64_t row) {
  const int32_t num_top = p.out_top_ids != nullptr && p.out_top_logprobs != nullptr ? p.num_top : 0;
  return {p.out_logprobs != nullptr ? p.out_logprobs + row : nullptr,
          p.out_ranks != nullptr ? p.out_ranks + row : nullptr, num_top > 0 ? p.out_top_ids + row * num_top : nullptr,
          num_top > 0 ? p.out_top_logprobs + row * num_top : nullptr, num_top};
}

struct SumAndRank {
  double sum = 0.0;
  int32_t greater = 0, unused = 0;
};

template <bool kResident>
class RowSampler {
 public:
  __device__ __forceinline__ RowSampler(const RawRow& raw, const Layout& layout, int64_t row)
      : raw_(raw), row_(row), slice_(raw, layout, row, team_.rank()) {
    cluster::arrive();
  }

  __device__ void sample(const SampleParams& p) {
    const LogprobTargets targets = logprob_targets(p, row_);
    const RowStats raw_stats = load_first();
    RowStats stats = raw_stats;
    const bool changes = is_adjusted(p, row_);
    if (raw_stats.is_valid() && changes) {
      adjust(p, row_, slice_);
      stats = team_.all_reduce(slice_.stats(), RowStats{}, CombineStats{});
    }
    const bool is_valid = stats.is_valid();
    const int32_t id = is_valid ? pick(p, stats, targets.any()) : 0;
    if (is_writer()) p.out_ids[row_] = id, p.out_status[row_] = is_valid ? 0 : 1;
    if (targets.any()) {
      if (is_valid && changes) load();
      write_logprobs(is_valid, raw_stats, id, targets);
    }
  }

  __device__ void logprobs_of(const TokenLogprobsParams& p) {
    const RowStats stats = load_first();
    const int64_t id = p.ids[row_];
    const bool is_known = is_usable_index("ids", id, raw_.vocab_size, kNoSkipMark);
    if (is_writer()) p.out_status[row_] = stats.is_valid() ? 0 : 1;
    write_logprobs(stats.is_valid() && is_known, stats, static_cast<int32_t>(id), logprob_targets(p, row_));
  }

 private:
  __device__ __forceinline__ bool is_writer() const { return team_.is_first() && threadIdx.x == 0; }

  __device__ __noinline__ RowStats load() { return team_.all_reduce(slice_.load(raw_), RowStats{}, CombineStats{}); }

  // Other blocks' memory may be written only once they have begun, which the barrier in two parts tells.
  __device__ RowStats load_first() {
    const RowStats mine = slice_.load(raw_);
    cluster::wait();
    return team_.all_reduce(mine, RowStats{}, CombineStats{});
  }

  // The token; known to the first block, and to all where `tells_all`.
  __device__ int32_t pick(const SampleParams& p, const RowStats& stats, bool tells_all) {
    const float temperature = row_value(p.temperature, row_, 0.0f);
    if (temperature < kGreedyTemperature) return first_equal(stats.largest);
    const Softmax softmax = softmax_of(p, row_, stats.largest);
    ListCuts cuts = cuts_of(p, row_, stats.largest);
    const float range = stats.largest - stats.smallest;
    Threshold kept;
    if (cuts.top_k > 0) {
      const Goal goal{static_cast<uint32_t>(cuts.top_k), 0.0, -kInfinity, false, raw_.vocab_size};
      Selector<kResident, ByCount> selector(team_, slice_, goal, softmax);
      const Selection found = selector.select(fminf(range, fmaxf(kReachLogits, kReachNats * temperature)));
      if (found.has_cut && found.is_list && found.is_complete) return draw_in_first(found, cuts, softmax, tells_all);
      if (found.has_cut) kept.raise(threshold_of(found, goal.count, false));
    }
    if (cuts.top_p < 1.0) {
      const Goal goal{0, cuts.top_p, kept.value, false, raw_.vocab_size};
      Selector<kResident, ByMass> selector(team_, slice_, goal, softmax);
      const Selection found = selector.select(fminf(range, kReachNats * temperature));
      if (found.is_list && found.is_complete) {
        cuts.top_k = 0, cuts.wanted = found.wanted;
        return draw_in_first(found, cuts, softmax, tells_all);
      }
      kept.raise(threshold_by_mass(found, softmax));
    }
    if (cuts.lowest > -kInfinity) kept.raise({cuts.lowest, kLastIndex});
    return draw_from_slices(kept, softmax, cuts.uniform);
  }

  __device__ __noinline__ int32_t draw_from_slices(const Threshold& kept, const Softmax& softmax, double uniform) {
    // Copies, so that the walks find all in registers.
    const Threshold threshold = kept;
    const Softmax own_softmax = softmax;
    const Slice<kResident> slice = slice_;
    return find_by_mass(
        team_, slice,
        [=](float x, int32_t id) {
          const float weight = own_softmax(x);
          return threshold.keeps(x, id) ? weight : 0.0f;
        },
        [=](double total) { return uniform * total; });
  }

  __device__ int32_t first_equal(float value) {
    int32_t first = INT32_MAX;
    slice_.for_each([&](float x, int32_t id) { first = x == value ? min(first, id) : first; });
    return team_.minimum(first);
  }

  // The list is in the first block, which goes on alone. Others leave, or wait where they must know the token.
  __device__ int32_t draw_in_first(const Selection& found, const ListCuts& cuts, const Softmax& softmax,
                                   bool tells_all) {
    int32_t id = 0;
    if (team_.is_first()) {
      id = draw_from_list(static_cast<int>(found.count), cuts, softmax);
      __syncthreads();
      if (tells_all && threadIdx.x < kWarpLanes) team_.publish(&BlockShared::found, id);
    }
    if (!tells_all) return id;
    team_.barrier();
    return block_shared().found;
  }

  template <typename Cut>
  __device__ Threshold threshold_from_first(Cut cut) {
    if (team_.is_first()) {
      const Threshold threshold = cut();
      if (threadIdx.x < kWarpLanes) team_.publish(&BlockShared::threshold, threshold);
    }
    team_.barrier();
    return block_shared().threshold;
  }

  // is_exact: of equal entries only so many as to make the count.
  __device__ Threshold threshold_of(const Selection& found, uint32_t count, bool is_exact) {
    if (found.is_list) {
      return threshold_from_first([&] { return cut_list_by_count(found, count, is_exact); });
    }
    if (!is_exact) return {found.value, kLastIndex};
    const double number = static_cast<double>(count - found.count_above);
    return {found.value, nth_equal(team_, slice_, found.value, number, raw_.vocab_size)};
  }

  __device__ Threshold threshold_by_mass(const Selection& found, const Softmax& softmax) {
    if (found.is_list) return threshold_from_first([&] { return cut_list_by_mass(found, softmax); });
    const double needed = ceil((found.wanted - found.mass_above) / static_cast<double>(softmax(found.value)));
    const double number = fmin(fmax(needed, 1.0), static_cast<double>(found.count));
    return {found.value, nth_equal(team_, slice_, found.value, number, raw_.vocab_size)};
  }

  // The slice holds the raw logits.
  __device__ void write_logprobs(bool is_valid, const RowStats& stats, int32_t id, const LogprobTargets& targets) {
    if (!is_valid) {
      if (team_.is_first()) write_failure(targets);
      return;
    }
    const Softmax softmax{stats.largest, 1.0f};
    const float logit = raw_logit(id);
    SumAndRank mine;
    slice_.template for_each_pack<1>([&](const float (&x)[kSlicePack], int32_t) {
      float weights[kSlicePack];
#pragma unroll
      for (int e = 0; e < kSlicePack; ++e) weights[e] = softmax(x[e]), mine.greater += x[e] > logit;
#pragma unroll
      for (int e = 0; e < kSlicePack; ++e) mine.sum += static_cast<double>(weights[e]);
    });
    const SumAndRank all = team_.all_reduce(mine, SumAndRank{}, [](const SumAndRank& a, const SumAndRank& b) {
      return SumAndRank{a.sum + b.sum, a.greater + b.greater, 0};
    });
    const double log_denominator = static_cast<double>(stats.largest) + log(all.sum);
    if (is_writer()) {
      if (targets.logprob != nullptr) *targets.logprob = logprob(logit, log_denominator);
      if (targets.rank != nullptr) *targets.rank = 1 + all.greater;
    }
    if (targets.num_top > 0) write_largest(stats, softmax, log_denominator, targets);
  }

  __device__ __forceinline__ static float logprob(float logit, double log_denominator) {
    return fmaxf(static_cast<float>(static_cast<double>(logit) - log_denominator), kLowestLogprob);
  }

  __device__ float raw_logit(int32_t id) const {
    switch (raw_.dtype) {
      case DType::kFloat32:
        return static_cast<const float*>(raw_.logits)[id];
      case DType::kBFloat16:
        return to_float(static_cast<const BFloat16*>(raw_.logits)[id]);
      case DType::kFloat16:
        break;
    }
    return to_float(static_cast<const Float16*>(raw_.logits)[id]);
  }

  __device__ void write_largest(const RowStats& stats, const Softmax& softmax, double log_denominator,
                                const LogprobTargets& targets) {
    const int32_t count = min(targets.num_top, raw_.vocab_size);
    const Goal goal{static_cast<uint32_t>(count), 0.0, -kInfinity, true, raw_.vocab_size};
    Selector<kResident, ByCount> selector(team_, slice_, goal, softmax);
    const Selection found = selector.select(fminf(stats.largest - stats.smallest, kReachLogits));
    uint32_t listed = found.count;
    if (!found.is_list || !found.is_complete) {
      const Threshold threshold = threshold_of(found, static_cast<uint32_t>(count), true);
      if (is_writer()) block_shared().num_candidates = 0;
      team_.barrier();
      BlockShared& first = team_.shared_of(0);
      slice_.for_each([&](float x, int32_t id) {
        if (!threshold.keeps(x, id)) return;
        const uint32_t place = atomicAdd(&first.num_candidates, 1u);
        if (place < kMaxCandidates) first.candidates[place] = candidate_of(x, id);
      });
      team_.barrier();
      listed = static_cast<uint32_t>(count);
    }
    if (!team_.is_first()) return;
    sort_list(static_cast<int>(listed));
    for (int i = threadIdx.x; i < targets.num_top; i += kThreads) {
      const bool is_there = i < count;
      targets.top_ids[i] = is_there ? candidate_id(block_shared().candidates[i]) : 0;
      targets.top_logprobs[i] =
          is_there ? logprob(candidate_value(block_shared().candidates[i]), log_denominator) : kLowestLogprob;
    }
  }

  __device__ void write_failure(const LogprobTargets& targets) {
    if (threadIdx.x == 0 && targets.logprob != nullptr) *targets.logprob = kLowestLogprob;
    if (threadIdx.x == 0 && targets.rank != nullptr) *targets.rank = 0;
    for (int i = threadIdx.x; i < targets.num_top; i += kThreads) {
      targets.top_ids[i] = 0;
      targets.top_logprobs[i] = kLowestLogprob;
    }
  }

  Team team_;
  const RawRow raw_;
  const int64_t row_;
  Slice<kResident> slice_;
};

}  // namespace pagemill::cuda::sampling
