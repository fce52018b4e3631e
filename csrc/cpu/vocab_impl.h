// Passes over a row of logits, for the instruction set of the including file.
#pragma once

#include "elementwise_impl.h"

namespace pagemill {
namespace {

// Sums are taken over blocks of this many entries in float and over blocks in double: exact enough for any vocabulary.
constexpr int64_t kVocabBlock = 256;

template <typename T>
VocabStats vocab_stats_of(const T* x, int64_t n) {
  constexpr float kInfinity = __builtin_inff();
  float best = -kInfinity;
  int64_t best_block = -1;
  bool unordered = false;
  for (int64_t block = 0; block < n; block += kVocabBlock) {
    const int64_t end = block + kVocabBlock < n ? block + kVocabBlock : n;
    VecF m = set1(-kInfinity);
    // Any NaN or infinity makes this NaN; only then are the entries looked at one by one (-inf is no fault).
    VecF bad = zero();
    int64_t i = block;
    for (; i + W <= end; i += W) {
      const VecF v = load(x + i);
      m = max(v, m);
      bad = fma(v, zero(), bad);
    }
    if (i < end) {
      const VecF v = load_first(x + i, end - i, -kInfinity);
      m = max(v, m);
      bad = fma(v, zero(), bad);
    }
    if (any_unordered(bad)) {
      for (int64_t j = block; j < end; ++j) {
        const float v = to_float(x[j]);
        unordered |= v != v || v == kInfinity;
      }
    }
    const float block_max = reduce_max(m);
    if (block_max > best) {
      best = block_max;
      best_block = block;
    }
  }
  if (unordered || best_block < 0) return {best, 0, false};
  int64_t index = best_block;
  while (to_float(x[index]) != best && index + 1 < n) ++index;
  return {best, index, true};
}

template <typename T>
double vocab_sum_exp_of(const T* x, int64_t n, float maximum) {
  double total = 0.0;
  const VecF m = set1(maximum);
  for (int64_t block = 0; block < n; block += kVocabBlock) {
    const int64_t end = block + kVocabBlock < n ? block + kVocabBlock : n;
    VecF sum = zero();
    int64_t i = block;
    for (; i + W <= end; i += W) sum = sum + exp(load(x + i) - m);
    if (i < end) sum = sum + exp(load_first(x + i, end - i, -__builtin_inff()) - m);
    total += static_cast<double>(reduce_add(sum));
  }
  return total;
}

template <typename T>
int64_t vocab_count_greater_of(const T* x, int64_t n, float threshold) {
  int64_t count = 0;
  const VecF t = set1(threshold);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    // Few logits exceed a sampled one, so the lanes are looked at only where one does.
    if (!any_greater(load(x + i), t)) continue;
    for (int64_t j = i; j < i + W; ++j) count += to_float(x[j]) > threshold;
  }
  for (; i < n; ++i) count += to_float(x[i]) > threshold;
  return count;
}

VocabStats vocab_stats(const void* logits, DType dtype, int64_t n) {
  return with_element_type(dtype, [&](auto e) { return vocab_stats_of(static_cast<const decltype(e)*>(logits), n); });
}
double vocab_sum_exp(const void* logits, DType dtype, int64_t n, float maximum) {
  return with_element_type(
      dtype, [&](auto e) { return vocab_sum_exp_of(static_cast<const decltype(e)*>(logits), n, maximum); });
}
int64_t vocab_count_greater(const void* logits, DType dtype, int64_t n, float threshold) {
  return with_element_type(
      dtype, [&](auto e) { return vocab_count_greater_of(static_cast<const decltype(e)*>(logits), n, threshold); });
}
void vocab_to_float(const void* logits, DType dtype, int64_t n, float* out) {
  with_element_type(dtype, [&](auto e) {
    const auto* x = static_cast<const decltype(e)*>(logits);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(x + i));
    for (; i < n; ++i) out[i] = to_float(x[i]);
  });
}
void vocab_weights(const float* x, int64_t n, float maximum, float inverse_temperature, float* weights) {
  const VecF m = set1(maximum), scale = set1(inverse_temperature);
  int64_t i = 0;
  for (; i + W <= n; i += W) store(weights + i, exp((load(x + i) - m) * scale));
  if (i < n) store_first(weights + i, n - i, exp((load_first(x + i, n - i) - m) * scale));
}

void vocab_group_maxima(const float* x, int64_t n, float* maxima) {
  for (int64_t group = 0; group < n; group += kVocabGroup) {
    const int64_t end = group + kVocabGroup < n ? group + kVocabGroup : n;
    VecF m = set1(-__builtin_inff());
    int64_t i = group;
    for (; i + W <= end; i += W) m = max(load(x + i), m);
    if (i < end) m = max(load_first(x + i, end - i, -__builtin_inff()), m);
    maxima[group / kVocabGroup] = reduce_max(m);
  }
}
int64_t vocab_collect(const float* x, int64_t n, float least, int32_t* places) {
  const VecF bound = set1(least);
  int64_t count = 0, i = 0;
  for (; i + W <= n; i += W) {
    for (uint32_t lanes = lanes_not_less(load(x + i), bound); lanes != 0; lanes &= lanes - 1) {
      places[count++] = static_cast<int32_t>(i + __builtin_ctz(lanes));
    }
  }
  for (; i < n; ++i) {
    if (x[i] >= least) places[count++] = static_cast<int32_t>(i);
  }
  return count;
}
void vocab_buckets(const float* x, int64_t n, float maximum, float scale, int32_t last, int32_t* buckets) {
  const VecF m = set1(maximum), s = set1(scale), most = set1(static_cast<float>(last));
  int64_t i = 0;
  for (; i + W <= n; i += W) store_whole(buckets + i, min((m - load(x + i)) * s, most));
  for (; i < n; ++i) {
    const float distance = (maximum - x[i]) * scale;
    buckets[i] = distance < static_cast<float>(last) ? static_cast<int32_t>(distance) : last;
  }
}

}  // namespace
}  // namespace pagemill
