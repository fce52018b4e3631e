// Sampling and log-probabilities: what is done per row of logits. Rows are the unit of parallel work, so a row's token
// does not depend on its neighbours.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "kernel_table.h"
#include "pagemill/kernels.h"
#include "pagemill/philox.h"
#include "pagemill/thread_pool.h"
#include "token_selection.h"

namespace pagemill {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kGreedyTemperature = 1e-5f;
constexpr float kLowestLogprob = -9999.0f;

// Per thread, sized for the largest vocabulary seen.
struct Scratch {
  std::vector<float> logits;
  std::vector<int32_t> counts;  // all zero between rows
};
thread_local Scratch scratch;

template <typename T>
T row_value(const T* values, int64_t row, T otherwise) {
  return values != nullptr ? values[row] : otherwise;
}

struct IdRange {
  const int32_t* begin_;
  const int32_t* end_;
  const int32_t* begin() const { return begin_; }
  const int32_t* end() const { return end_; }
  bool empty() const { return begin_ == end_; }
};

// ends: null where a row's ids end where the next one's begin.
IdRange row_ids(const int32_t* offsets, const int32_t* ends, const int32_t* ids, int64_t row) {
  if (offsets == nullptr) return {nullptr, nullptr};
  return {ids + offsets[row], ids + (ends != nullptr ? ends[row] : offsets[row + 1])};
}

const void* row_logits(const void* logits, DType dtype, int64_t stride, int64_t row) {
  return static_cast<const char*>(logits) + row * stride * dtype_bytes(dtype);
}

float logit_at(const void* logits, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(logits)[index];
    case DType::kBFloat16: {
      const uint32_t bits = uint32_t{static_cast<const uint16_t*>(logits)[index]} << 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      return value;
    }
    case DType::kFloat16:
      break;
  }
  float value;
  kernel_table().vocab_to_float(static_cast<const uint16_t*>(logits) + index, dtype, 1, &value);
  return value;
}

void apply_penalties(const SampleParams& p, int64_t row, float* x) {
  const float presence = row_value(p.presence_penalty, row, 0.0f);
  const float frequency = row_value(p.frequency_penalty, row, 0.0f);
  const float repetition = row_value(p.repetition_penalty, row, 1.0f);
  if (presence == 0.0f && frequency == 0.0f && repetition == 1.0f) return;
  const IdRange prompt = row_ids(p.prompt_offsets, p.prompt_ends, p.prompt_ids, row);
  const IdRange output = row_ids(p.output_offsets, p.output_ends, p.output_ids, row);
  auto& counts = scratch.counts;
  if (static_cast<int64_t>(counts.size()) < p.vocab_size) counts.resize(static_cast<size_t>(p.vocab_size), 0);
  // Low bits: occurrences in the output; the sign bit: seen in the prompt.
  constexpr int32_t kInPrompt = std::numeric_limits<int32_t>::min();
  for (const int32_t id : output) ++counts[static_cast<size_t>(id)];
  for (const int32_t id : prompt) counts[static_cast<size_t>(id)] |= kInPrompt;
  for (const IdRange& ids : {output, prompt}) {
    for (const int32_t id : ids) {
      int32_t& count = counts[static_cast<size_t>(id)];
      if (count == 0) continue;
      const int32_t occurrences = count & ~kInPrompt;
      float& logit = x[id];
      logit = logit > 0.0f ? logit / repetition : logit * repetition;
      if (occurrences > 0) logit -= presence + frequency * static_cast<float>(occurrences);
      count = 0;
    }
  }
}

// The row as float32 with bias, penalties and mask applied.
const float* adjusted_logits(const SampleParams& p, int64_t row, const void* raw) {
  auto& logits = scratch.logits;
  if (static_cast<int64_t>(logits.size()) < p.vocab_size) logits.resize(static_cast<size_t>(p.vocab_size));
  float* x = logits.data();
  kernel_table().vocab_to_float(raw, p.dtype, p.vocab_size, x);
  if (p.bias_offsets != nullptr) {
    for (int32_t i = p.bias_offsets[row]; i < p.bias_offsets[row + 1]; ++i) x[p.bias_ids[i]] += p.bias_values[i];
  }
  apply_penalties(p, row, x);
  for (const int32_t id : row_ids(p.masked_offsets, nullptr, p.masked_ids, row)) x[id] = -kInfinity;
  return x;
}

bool is_adjusted(const SampleParams& p, int64_t row) {
  const bool biased = p.bias_offsets != nullptr && p.bias_offsets[row] != p.bias_offsets[row + 1];
  const bool masked = p.masked_offsets != nullptr && p.masked_offsets[row] != p.masked_offsets[row + 1];
  const bool penalised = row_value(p.presence_penalty, row, 0.0f) != 0.0f ||
                         row_value(p.frequency_penalty, row, 0.0f) != 0.0f ||
                         row_value(p.repetition_penalty, row, 1.0f) != 1.0f;
  return biased || masked || penalised;
}

int64_t sample_row(const SampleParams& p, int64_t row, const float* x, float maximum) {
  const double uniform = uniform_draw(row_value(p.seeds, row, uint64_t{0}), row_value(p.positions, row, int64_t{0}));
  return draw_token(x, p.vocab_size, maximum,
                    {p.temperature[row], row_value(p.top_k, row, int32_t{0}),
                     static_cast<double>(row_value(p.top_p, row, 1.0f)), row_value(p.min_p, row, 0.0f), uniform});
}

struct TopEntries {
  int32_t* ids;
  float* logprobs;
  int32_t count;
};

void largest_logits(const void* raw, DType dtype, int64_t n, double log_denominator, TopEntries top) {
  if (top.count == 0) return;
  auto& logits = scratch.logits;
  if (static_cast<int64_t>(logits.size()) < n) logits.resize(static_cast<size_t>(n));
  float* x = logits.data();
  kernel_table().vocab_to_float(raw, dtype, n, x);
  // Insertion into a short sorted list: nearly every entry fails the first comparison.
  int32_t size = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (size == top.count && !(x[i] > x[top.ids[size - 1]])) continue;
    int32_t place = size < top.count ? size++ : size - 1;
    for (; place > 0 && x[i] > x[top.ids[place - 1]]; --place) top.ids[place] = top.ids[place - 1];
    top.ids[place] = static_cast<int32_t>(i);
  }
  for (int32_t i = 0; i < top.count; ++i) {
    const double value = i < size ? static_cast<double>(x[top.ids[i]]) - log_denominator : -1e30;
    if (i >= size) top.ids[i] = 0;
    top.logprobs[i] = std::max(static_cast<float>(value), kLowestLogprob);
  }
}

struct LogprobTargets {
  float* logprob;
  int32_t* rank;
  TopEntries top;
};

void write_logprobs(const void* raw, DType dtype, int64_t n, float maximum, int64_t id, const LogprobTargets& out) {
  const KernelTable& table = kernel_table();
  const double log_denominator = static_cast<double>(maximum) + std::log(table.vocab_sum_exp(raw, dtype, n, maximum));
  const float logit = logit_at(raw, dtype, id);
  if (out.logprob != nullptr) {
    *out.logprob = std::max(static_cast<float>(static_cast<double>(logit) - log_denominator), kLowestLogprob);
  }
  if (out.rank != nullptr) *out.rank = static_cast<int32_t>(1 + table.vocab_count_greater(raw, dtype, n, logit));
  largest_logits(raw, dtype, n, log_denominator, out.top);
}

void write_failure(const LogprobTargets& out) {
  if (out.logprob != nullptr) *out.logprob = kLowestLogprob;
  if (out.rank != nullptr) *out.rank = 0;
  for (int32_t i = 0; i < out.top.count; ++i) {
    out.top.ids[i] = 0;
    out.top.logprobs[i] = kLowestLogprob;
  }
}

TopEntries top_of_row(int32_t* ids, float* logprobs, int32_t num_top, int64_t row) {
  if (ids == nullptr || logprobs == nullptr) return {nullptr, nullptr, 0};
  return {ids + row * num_top, logprobs + row * num_top, num_top};
}

void run_row(const SampleParams& p, int64_t row) {
  const KernelTable& table = kernel_table();
  const void* raw = row_logits(p.logits, p.dtype, p.logits_stride, row);
  const VocabStats raw_stats = table.vocab_stats(raw, p.dtype, p.vocab_size);
  const LogprobTargets targets{p.out_logprobs != nullptr ? p.out_logprobs + row : nullptr,
                               p.out_ranks != nullptr ? p.out_ranks + row : nullptr,
                               top_of_row(p.out_top_ids, p.out_top_logprobs, p.num_top, row)};
  const bool greedy = row_value(p.temperature, row, 0.0f) < kGreedyTemperature;
  const bool adjusted = is_adjusted(p, row);
  VocabStats stats = raw_stats;
  int64_t id = raw_stats.argmax;
  if (raw_stats.valid && (adjusted || !greedy)) {
    const bool is_ready = !adjusted && p.dtype == DType::kFloat32;
    const float* x = is_ready ? static_cast<const float*>(raw) : adjusted_logits(p, row, raw);
    if (adjusted) stats = table.vocab_stats(x, DType::kFloat32, p.vocab_size);
    id = stats.argmax;
    if (stats.valid && !greedy) id = sample_row(p, row, x, stats.maximum);
  }
  p.out_status[row] = stats.valid ? 0 : 1;
  p.out_ids[row] = stats.valid ? id : 0;
  if (targets.logprob == nullptr && targets.rank == nullptr && targets.top.count == 0) return;
  if (stats.valid) {
    write_logprobs(raw, p.dtype, p.vocab_size, raw_stats.maximum, id, targets);
  } else {
    write_failure(targets);
  }
}

int check_ids(const char* name, const int32_t* offsets, const int32_t* ends, const int32_t* ids, int64_t num_rows,
              int64_t vocab_size) {
  if (offsets == nullptr) return 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const int32_t end = ends != nullptr ? ends[row] : offsets[row + 1];
    if (offsets[row] < 0 || end < offsets[row]) {
      return fail("%s offsets descend at row %lld", name, static_cast<long long>(row));
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    for (const int32_t id : row_ids(offsets, ends, ids, row)) {
      if (id < 0 || id >= vocab_size) {
        return fail("%s id %d is outside the vocabulary of %lld", name, id, static_cast<long long>(vocab_size));
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace pagemill

extern "C" {

using namespace pagemill;

int pagemill_sample(const SampleParams* params) {
  const SampleParams& p = *params;
  const int64_t rows = p.num_rows, vocab = p.vocab_size;
  if (const int error = check_ids("prompt", p.prompt_offsets, p.prompt_ends, p.prompt_ids, rows, vocab)) return error;
  if (const int error = check_ids("output", p.output_offsets, p.output_ends, p.output_ids, rows, vocab)) return error;
  if (const int error = check_ids("logit_bias", p.bias_offsets, nullptr, p.bias_ids, rows, vocab)) return error;
  if (const int error = check_ids("masked", p.masked_offsets, nullptr, p.masked_ids, rows, vocab)) return error;
  if (p.num_rows == 1) {
    run_row(p, 0);
  } else if (p.num_rows > 1) {
    parallel_for(p.num_rows, [&](int64_t row, int) { run_row(p, row); });
  }
  return 0;
}

int pagemill_token_logprobs(const TokenLogprobsParams* params) {
  const TokenLogprobsParams& p = *params;
  for (int64_t row = 0; row < p.num_rows; ++row) {
    if (p.ids[row] < 0 || p.ids[row] >= p.vocab_size) {
      return fail("ids[%lld] is %lld, outside the vocabulary of %lld", static_cast<long long>(row),
                  static_cast<long long>(p.ids[row]), static_cast<long long>(p.vocab_size));
    }
  }
  const auto run = [&](int64_t row) {
    const void* raw = row_logits(p.logits, p.dtype, p.logits_stride, row);
    const VocabStats stats = kernel_table().vocab_stats(raw, p.dtype, p.vocab_size);
    const LogprobTargets targets{p.out_logprobs + row, p.out_ranks + row,
                                 top_of_row(p.out_top_ids, p.out_top_logprobs, p.num_top, row)};
    p.out_status[row] = stats.valid ? 0 : 1;
    if (stats.valid) {
      write_logprobs(raw, p.dtype, p.vocab_size, stats.maximum, p.ids[row], targets);
    } else {
      write_failure(targets);
    }
  };
  if (p.num_rows > 0) parallel_for(p.num_rows, [&](int64_t row, int) { run(row); });
  return 0;
}
}
