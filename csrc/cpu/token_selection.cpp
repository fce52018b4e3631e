// Selection looks closely at few entries: vector passes over the vocabulary find candidates, and everything that
// depends on order is done on these, or on the weights of all entries where nothing but temperature is asked for. Sums
// are taken in the order of ids in any case, so that a token does not depend on how candidates were found.
#include "token_selection.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "kernel_table.h"

namespace pagemill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kEveryIndex = std::numeric_limits<int64_t>::max();

// Logits with their ids, ascending; ids null: entry i has id i.
struct Entries {
  const int32_t* ids;
  const float* logits;
  const float* weights;
  int64_t count;

  int64_t id(int64_t i) const { return ids != nullptr ? ids[i] : i; }
};

// Per thread, sized for the largest vocabulary seen.
struct Scratch {
  std::vector<float> maxima, logits, weights, sorted;
  std::vector<int32_t> ids, buckets, candidates;
  std::vector<double> block_sums;
};
thread_local Scratch scratch;

template <typename T>
T* reserve(std::vector<T>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

// Which entries survive: those above (value, index) in the order "larger value first, then smaller index".
struct Threshold {
  float value = -kInfinity;
  int64_t last_index = kEveryIndex;

  bool keeps(float x, int64_t index) const { return x > value || (x == value && index <= last_index); }
  bool keeps_all() const { return value == -kInfinity; }
  void raise(const Threshold& other) {
    if (other.value > value || (other.value == value && other.last_index < last_index)) *this = other;
  }
};

// Buckets of logits by distance from the largest, so that selection looks closely at one bucket alone.
struct Buckets {
  static constexpr int kCount = 2048;
  static constexpr float kPerNat = 64.0f;
  float maximum, scale;

  // Of each logit; -inf is in the last one.
  const int32_t* of(const float* x, int64_t n) const {
    int32_t* buckets = reserve(scratch.buckets, n);
    kernel_table().vocab_buckets(x, n, maximum, scale, kCount - 1, buckets);
    return buckets;
  }

  // Nothing in the bucket is smaller.
  float least(int bucket) const {
    if (bucket == kCount - 1) return -std::numeric_limits<float>::max();
    // More than what rounding in the bucket's number can amount to.
    const double distance = (bucket + 1.0) / static_cast<double>(scale) * (1 + 1e-5);
    return std::nextafter(static_cast<float>(static_cast<double>(maximum) - distance), -kInfinity);
  }
};

// Places of the entries in a bucket that are above -inf, ascending.
std::vector<int32_t>& collect_bucket(const Entries& entries, const int32_t* buckets, int bucket, const Buckets& by) {
  auto& places = scratch.candidates;
  places.resize(static_cast<size_t>(entries.count));
  const int64_t found = kernel_table().vocab_collect(entries.logits, entries.count, by.least(bucket), places.data());
  places.resize(static_cast<size_t>(found));
  places.erase(std::remove_if(places.begin(), places.end(), [&](int32_t i) { return buckets[i] != bucket; }),
               places.end());
  return places;
}

// A value that at least k logits reach; -inf where groups of logits do not tell.
float reached_by(const float* x, int64_t n, int64_t k) {
  const int64_t num_groups = (n + kVocabGroup - 1) / kVocabGroup;
  if (k > num_groups / 2) return -kInfinity;
  float* maxima = reserve(scratch.maxima, num_groups);
  kernel_table().vocab_group_maxima(x, n, maxima);
  std::nth_element(maxima, maxima + k - 1, maxima + num_groups, std::greater<>());
  return maxima[k - 1];
}

// The k-th largest logit; -inf where fewer than k are above that.
float kth_largest(const float* x, int64_t n, int64_t k, const Buckets& by) {
  const float reached = reached_by(x, n, k);
  if (reached != -kInfinity) {
    int32_t* ids = reserve(scratch.ids, n);
    const int64_t found = kernel_table().vocab_collect(x, n, reached, ids);
    float* sorted = reserve(scratch.sorted, found);
    for (int64_t i = 0; i < found; ++i) sorted[i] = x[ids[i]];
    std::nth_element(sorted, sorted + k - 1, sorted + found, std::greater<>());
    return sorted[k - 1];
  }
  const int32_t* buckets = by.of(x, n);
  int64_t counts[Buckets::kCount] = {};
  for (int64_t i = 0; i < n; ++i) counts[buckets[i]] += x[i] != -kInfinity;
  int64_t before = 0;
  for (int bucket = 0; bucket < Buckets::kCount; before += counts[bucket++]) {
    if (before + counts[bucket] < k) continue;
    auto& places = collect_bucket({nullptr, x, nullptr, n}, buckets, bucket, by);
    const auto nth = places.begin() + (k - before - 1);
    std::nth_element(places.begin(), nth, places.end(), [x](int32_t a, int32_t b) { return x[a] > x[b]; });
    return x[*nth];
  }
  return -kInfinity;
}

// Keeps the shortest run of most likely entries whose probability reaches top_p; at least one.
Threshold top_p_threshold(const Entries& entries, double top_p, const Buckets& by) {
  const float *x = entries.logits, *weights = entries.weights;
  const int32_t* buckets = by.of(x, entries.count);
  double mass[Buckets::kCount] = {};
  for (int64_t i = 0; i < entries.count; ++i) mass[buckets[i]] += static_cast<double>(weights[i]);
  double total = 0.0;
  for (const double m : mass) total += m;
  const double wanted = top_p * total;
  double before = 0.0;
  for (int bucket = 0; bucket < Buckets::kCount; ++bucket) {
    if (before + mass[bucket] < wanted) {
      before += mass[bucket];
      continue;
    }
    auto& places = collect_bucket(entries, buckets, bucket, by);
    if (places.empty()) continue;
    std::sort(places.begin(), places.end(),
              [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
    for (const int32_t place : places) {
      before += static_cast<double>(weights[place]);
      if (before >= wanted) return {x[place], entries.id(place)};
    }
    return {x[places.back()], entries.id(places.back())};
  }
  return {};
}

// Entries are summed by blocks of so many ids, in order within a block and from block to block.
constexpr int64_t kDrawBlock = 256;

// Inverse transform over all entries in the order of their ids. They carry at least one weight.
int64_t draw_from(const Entries& entries, const double* block_sums, int64_t num_ids, double uniform) {
  const int64_t num_blocks = (num_ids + kDrawBlock - 1) / kDrawBlock;
  double total = 0.0;
  for (int64_t block = 0; block < num_blocks; ++block) total += block_sums[block];
  double target = uniform * total;
  int64_t last_possible = -1, i = 0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t end_id = (block + 1) * kDrawBlock;
    if (target >= block_sums[block] && block + 1 < num_blocks) {
      target -= block_sums[block];
      continue;
    }
    i = entries.ids == nullptr
            ? block * kDrawBlock
            : std::lower_bound(entries.ids + i, entries.ids + entries.count, block * kDrawBlock) - entries.ids;
    for (; i < entries.count && entries.id(i) < end_id; ++i) {
      if (entries.weights[i] <= 0.0f) continue;
      last_possible = entries.id(i);
      target -= static_cast<double>(entries.weights[i]);
      if (target < 0.0) return last_possible;
    }
  }
  // Rounding left a remainder: the last entry with any weight takes it.
  if (last_possible >= 0) return last_possible;
  for (i = entries.count - 1; i > 0; --i) {
    if (entries.weights[i] > 0.0f) return entries.id(i);
  }
  return entries.id(0);
}

// The sum of a block waits for each of its additions, so several blocks are summed side by side.
const double* sums_of_all(const float* weights, int64_t n) {
  constexpr int64_t kAtOnce = 8;
  const int64_t num_blocks = (n + kDrawBlock - 1) / kDrawBlock;
  double* sums = reserve(scratch.block_sums, num_blocks);
  std::fill_n(sums, num_blocks, 0.0);
  int64_t block = 0;
  for (; (block + kAtOnce) * kDrawBlock <= n; block += kAtOnce) {
    double side_by_side[kAtOnce] = {};
    const float* first = weights + block * kDrawBlock;
    for (int64_t i = 0; i < kDrawBlock; ++i) {
      for (int64_t j = 0; j < kAtOnce; ++j) side_by_side[j] += static_cast<double>(first[j * kDrawBlock + i]);
    }
    std::copy_n(side_by_side, kAtOnce, sums + block);
  }
  for (int64_t i = block * kDrawBlock; i < n; ++i) sums[i / kDrawBlock] += static_cast<double>(weights[i]);
  return sums;
}

const double* sums_of(const Entries& entries, int64_t num_ids) {
  const int64_t num_blocks = (num_ids + kDrawBlock - 1) / kDrawBlock;
  double* sums = reserve(scratch.block_sums, num_blocks);
  std::fill_n(sums, num_blocks, 0.0);
  for (int64_t i = 0; i < entries.count; ++i) {
    sums[entries.id(i) / kDrawBlock] += static_cast<double>(entries.weights[i]);
  }
  return sums;
}

// One row: entries become fewer as thresholds rise.
class Selection {
 public:
  Selection(const float* x, int64_t n, float maximum, float temperature)
      : x_(x),
        num_ids_(n),
        maximum_(maximum),
        inverse_(1.0f / temperature),
        by_{maximum, inverse_ * Buckets::kPerNat} {}

  void keep_top_k(int64_t k) {
    if (k <= 0 || k >= num_ids_) return;
    kept_.raise({kth_largest(x_, num_ids_, k, by_), kEveryIndex});
  }

  void keep_top_p(double top_p) {
    if (top_p < 1.0) kept_.raise(top_p_threshold(entries(), top_p, by_));
  }

  void keep_min_p(float min_p, float temperature) {
    if (min_p <= 0.0f) return;
    const float lowest = maximum_ + std::log(min_p) * temperature;
    kept_.raise({std::min(lowest, maximum_), kEveryIndex});
  }

  int64_t draw(double uniform) {
    const Entries left = entries();
    const double* sums = left.ids == nullptr ? sums_of_all(left.weights, left.count) : sums_of(left, num_ids_);
    return draw_from(left, sums, num_ids_, uniform);
  }

 private:
  // All that the thresholds so far keep, with their weights.
  Entries entries() {
    if (kept_.keeps_all()) {
      float* weights = reserve(scratch.weights, num_ids_);
      kernel_table().vocab_weights(x_, num_ids_, maximum_, inverse_, weights);
      return {nullptr, x_, weights, num_ids_};
    }
    int32_t* ids = reserve(scratch.ids, num_ids_);
    const int64_t found = kernel_table().vocab_collect(x_, num_ids_, kept_.value, ids);
    const auto is_dropped = [&](int32_t id) { return !kept_.keeps(x_[id], id); };
    const int64_t count = std::remove_if(ids, ids + found, is_dropped) - ids;
    float* logits = reserve(scratch.logits, count);
    float* weights = reserve(scratch.weights, count);
    for (int64_t i = 0; i < count; ++i) logits[i] = x_[ids[i]];
    kernel_table().vocab_weights(logits, count, maximum_, inverse_, weights);
    return {ids, logits, weights, count};
  }

  const float* x_;
  const int64_t num_ids_;
  const float maximum_, inverse_;
  const Buckets by_;
  Threshold kept_;
};

}  // namespace

int64_t draw_token(const float* x, int64_t n, float maximum, const TokenDraw& draw) {
  Selection selection(x, n, maximum, draw.temperature);
  selection.keep_top_k(draw.top_k);
  selection.keep_top_p(draw.top_p);
  selection.keep_min_p(draw.min_p, draw.temperature);
  return selection.draw(draw.uniform);
}

}  // namespace pagemill
