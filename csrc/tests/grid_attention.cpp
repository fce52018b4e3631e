// Attention and the store that fills its caches, against plain loops in double. Slots that hold no token hold NaN.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "kernel_grid.h"
#include "pagemill/kernels.h"

namespace pagemill::test {
namespace {

constexpr int32_t kHeads = 6, kKvHeads = 2, kGroup = kHeads / kKvHeads;
constexpr float kScales[kKvHeads] = {0.5f, 2.0f};

struct Options {
  int32_t window = -1;
  float soft_cap = 0.0f;
  bool has_slopes = false, has_sinks = false;
};

struct Batch {
  std::vector<int32_t> context_lens, query_lens;
  int32_t head_size, block_size;
  DType dtype;
  KvDType kv_dtype;
  Memory memory;
};

float slope_of(int32_t head) { return 0.5f / static_cast<float>(1 << head); }
float sink_of(int32_t head) { return static_cast<float>(head) - 2.0f; }

// The numbers of a sequence do not depend on the formats, so that one reference serves them all.
float query_number(int32_t seq, int32_t position, int32_t head, int32_t dim) {
  return eighth(seq * 1009 + position * 131 + head * 17 + dim);
}
float key_number(int32_t seq, int32_t position, int32_t head, int32_t dim) {
  return eighth(seq * 2003 + position * 257 + head * 29 + dim * 3 + 1);
}
float value_number(int32_t seq, int32_t position, int32_t head, int32_t dim) {
  return eighth(seq * 3001 + position * 521 + head * 37 + dim * 5 + 2);
}

double reference_score(const Batch& batch, const Options& options, int32_t seq, int32_t position, int32_t head,
                       int32_t key) {
  double score = 0;
  for (int32_t d = 0; d < batch.head_size; ++d) {
    score += static_cast<double>(query_number(seq, position, head, d)) *
             static_cast<double>(key_number(seq, key, head / kGroup, d));
  }
  score /= std::sqrt(static_cast<double>(batch.head_size));
  const auto cap = static_cast<double>(options.soft_cap);
  if (options.soft_cap != 0.0f) score = cap * std::tanh(score / cap);
  if (options.has_slopes) score += static_cast<double>(slope_of(head)) * (key - position);
  return score;
}

// One head of one token: head_size numbers, then the log of the denominator.
std::vector<double> reference_row(const Batch& batch, const Options& options, int32_t seq, int32_t position,
                                  int32_t head) {
  std::vector<double> row(static_cast<size_t>(batch.head_size) + 1, 0.0);
  double sum = options.has_sinks ? std::exp(static_cast<double>(sink_of(head))) : 0.0;
  const int32_t first = options.window >= 0 ? std::max(0, position - options.window + 1) : 0;
  for (int32_t key = first; key <= position; ++key) {
    const double weight = std::exp(reference_score(batch, options, seq, position, head, key));
    sum += weight;
    for (int32_t d = 0; d < batch.head_size; ++d) {
      row[static_cast<size_t>(d)] += weight * static_cast<double>(value_number(seq, key, head / kGroup, d));
    }
  }
  for (double& number : row) number /= sum;
  row.back() = std::log(sum);
  return row;
}

// All rows of a batch, token by token, head by head.
std::vector<double> reference(const Batch& batch, const Options& options) {
  std::vector<double> rows;
  for (size_t seq = 0; seq < batch.context_lens.size(); ++seq) {
    for (int32_t i = 0; i < batch.query_lens[seq]; ++i) {
      const int32_t position = batch.context_lens[seq] - batch.query_lens[seq] + i;
      for (int32_t head = 0; head < kHeads; ++head) {
        const auto row = reference_row(batch, options, static_cast<int32_t>(seq), position, head);
        rows.insert(rows.end(), row.begin(), row.end());
      }
    }
  }
  return rows;
}

// A batch in exactly sized memory: blocks are given out from the last to the first, so that the last sequence ends in
// block 0 and the first one's tail lies at the end of the cache.
class PagedBatch {
 public:
  explicit PagedBatch(const Batch& batch)
      : batch_(batch),
        num_tokens_(std::accumulate(batch.query_lens.begin(), batch.query_lens.end(), 0)),
        num_blocks_(count_blocks(batch)),
        cache_bytes_(num_blocks_ * kKvHeads * batch.block_size * batch.head_size *
                     kv_bytes(batch.kv_dtype, batch.dtype)),
        key_cache_(cache_bytes_, batch.memory),
        value_cache_(cache_bytes_, batch.memory),
        query_(num_tokens_ * kHeads * batch.head_size, batch.dtype, batch.memory),
        out_(num_tokens_ * kHeads * batch.head_size, batch.dtype, batch.memory),
        lse_(num_tokens_ * kHeads, batch.memory),
        table_(static_cast<int64_t>(batch.context_lens.size()) * max_blocks(batch), batch.memory),
        query_start_(static_cast<int64_t>(batch.context_lens.size()) + 1, batch.memory),
        context_lens_(static_cast<int64_t>(batch.context_lens.size()), batch.memory),
        scales_(kKvHeads, batch.memory),
        slopes_(kHeads, batch.memory),
        sinks_(kHeads, batch.memory) {
    poison(key_cache_);
    poison(value_cache_);
    std::copy(kScales, kScales + kKvHeads, scales_.data());
    int32_t free_block = static_cast<int32_t>(num_blocks_) - 1;
    for (size_t seq = 0; seq < batch.context_lens.size(); ++seq) fill_sequence(static_cast<int32_t>(seq), free_block);
    for (int32_t head = 0; head < kHeads; ++head) {
      slopes_[head] = slope_of(head);
      sinks_[head] = sink_of(head);
    }
  }

  int run(const Options& options) {
    PagedAttentionParams p = params();
    p.window = options.window;
    p.soft_cap = options.soft_cap;
    if (options.has_slopes) p.alibi_slopes = slopes_.data();
    if (options.has_sinks) p.sinks = sinks_.data();
    return pagemill_paged_attention(&p);
  }

  PagedAttentionParams params() {
    PagedAttentionParams p{};
    p.out = out_.data();
    p.query = query_.data();
    p.key_cache = key_cache_.data();
    p.value_cache = value_cache_.data();
    p.block_tables = table_.data();
    p.query_start = query_start_.data();
    p.context_lens = context_lens_.data();
    p.lse = lse_.data();
    if (batch_.kv_dtype != KvDType::kActivation) p.key_scale = p.value_scale = scales_.data();
    p.num_tokens = num_tokens_;
    p.num_blocks = num_blocks_;
    p.num_table_rows = p.num_seqs = static_cast<int32_t>(batch_.context_lens.size());
    p.max_blocks = p.block_table_stride = max_blocks(batch_);
    p.out_token_stride = p.query_token_stride = kHeads * batch_.head_size;
    p.out_head_stride = p.query_head_stride = p.head_size = batch_.head_size;
    p.num_query_heads = kHeads;
    p.num_kv_heads = kKvHeads;
    p.block_size = batch_.block_size;
    p.window = -1;
    p.scale = 1.0f / std::sqrt(static_cast<float>(batch_.head_size));
    p.dtype = batch_.dtype;
    p.kv_dtype = batch_.kv_dtype;
    return p;
  }

  void compare(const std::vector<double>& rows, const char* what) const {
    double worst = 0, worst_lse = 0;
    const double* expected = rows.data();
    for (int64_t row = 0; row < num_tokens_ * kHeads; ++row, expected += batch_.head_size + 1) {
      for (int32_t d = 0; d < batch_.head_size; ++d) {
        const double error = std::abs(out_[row * batch_.head_size + d] - expected[d]);
        worst = error <= worst ? worst : error;  // NaN becomes the worst, and stays it
      }
      const double error = std::abs(static_cast<double>(lse_[row]) - expected[batch_.head_size]);
      worst_lse = error <= worst_lse ? worst_lse : error;
    }
    expect(worst < tolerance(batch_.dtype), what);
    expect(worst_lse < 1e-3, "paged_attention lse");
  }

  int32_t* table() { return table_.data(); }
  int32_t* context_lens() { return context_lens_.data(); }
  int32_t* query_start() { return query_start_.data(); }

 private:
  static int32_t blocks_of(const Batch& batch, size_t seq) {
    return (batch.context_lens[seq] + batch.block_size - 1) / batch.block_size;
  }
  static int64_t count_blocks(const Batch& batch) {
    int64_t count = 0;
    for (size_t seq = 0; seq < batch.context_lens.size(); ++seq) count += blocks_of(batch, seq);
    return count;
  }
  static int32_t max_blocks(const Batch& batch) {
    int32_t most = 1;
    for (size_t seq = 0; seq < batch.context_lens.size(); ++seq) most = std::max(most, blocks_of(batch, seq));
    return most;
  }

  void poison(Buffer<uint8_t>& cache) const {
    if (batch_.kv_dtype != KvDType::kActivation) {
      std::fill(cache.data(), cache.data() + cache.size(), uint8_t{0x7f});
      return;
    }
    // All ones are NaN in each of the three types.
    std::fill(cache.data(), cache.data() + cache.size(), uint8_t{0xff});
  }

  void fill_sequence(int32_t seq, int32_t& free_block) {
    const auto index = static_cast<size_t>(seq);
    const int32_t context = batch_.context_lens[index], num_new = batch_.query_lens[index];
    int32_t* table = table_.data() + seq * max_blocks(batch_);
    for (int32_t i = 0; i < max_blocks(batch_); ++i) table[i] = -1;
    for (int32_t i = 0; i < blocks_of(batch_, index); ++i) table[i] = free_block--;
    context_lens_[seq] = context;
    query_start_[seq + 1] = query_start_[seq] + num_new;
    const int32_t d = batch_.head_size;
    for (int32_t i = 0; i < num_new; ++i) {
      for (int32_t head = 0; head < kHeads; ++head) {
        for (int32_t dim = 0; dim < d; ++dim) {
          const int64_t row = int64_t{query_start_[seq] + i} * kHeads + head;
          query_.set(row * d + dim, query_number(seq, context - num_new + i, head, dim));
        }
      }
    }
    store_sequence(seq, table);
  }

  void store_sequence(int32_t seq, const int32_t* table) {
    const int32_t d = batch_.head_size, context = batch_.context_lens[static_cast<size_t>(seq)];
    Numbers key(int64_t{context} * kKvHeads * d, batch_.dtype, batch_.memory);
    Numbers value(int64_t{context} * kKvHeads * d, batch_.dtype, batch_.memory);
    Buffer<int64_t> slots(context, batch_.memory);
    for (int32_t position = 0; position < context; ++position) {
      slots[position] = int64_t{table[position / batch_.block_size]} * batch_.block_size + position % batch_.block_size;
      for (int32_t head = 0; head < kKvHeads; ++head) {
        for (int32_t dim = 0; dim < d; ++dim) {
          const int64_t i = (int64_t{position} * kKvHeads + head) * d + dim;
          key.set(i, key_number(seq, position, head, dim));
          value.set(i, value_number(seq, position, head, dim));
        }
      }
    }
    StoreKvParams p{};
    p.key = key.data();
    p.value = value.data();
    p.key_cache = key_cache_.data();
    p.value_cache = value_cache_.data();
    p.slot_mapping = slots.data();
    if (batch_.kv_dtype != KvDType::kActivation) p.key_scale = p.value_scale = scales_.data();
    p.num_tokens = context;
    p.num_blocks = num_blocks_;
    p.key_token_stride = p.value_token_stride = kKvHeads * d;
    p.key_head_stride = p.value_head_stride = p.head_size = d;
    p.num_kv_heads = kKvHeads;
    p.block_size = batch_.block_size;
    p.dtype = batch_.dtype;
    p.kv_dtype = batch_.kv_dtype;
    expect(pagemill_store_kv(&p) == 0, "store_kv status");
  }

  const Batch batch_;
  const int64_t num_tokens_, num_blocks_, cache_bytes_;
  Buffer<uint8_t> key_cache_, value_cache_;
  Numbers query_, out_;
  Buffer<float> lse_;
  Buffer<int32_t> table_, query_start_, context_lens_;
  Buffer<float> scales_, slopes_, sinks_;
};

#if defined(PAGEMILL_FEW_HEAD_SIZES)
constexpr int32_t kHeadSizes[] = {64, 80};
#else
constexpr int32_t kHeadSizes[] = {64, 80, 96, 112, 128, 192, 256};
#endif

Batch ragged_batch(int32_t head_size) {
  return {{150, 1, 17, 40}, {1, 1, 3, 40}, head_size, 16, DType::kFloat32, KvDType::kActivation, Memory::kHeap};
}

}  // namespace

void test_attention() {
  int combination = 0;
  for (const int32_t head_size : kHeadSizes) {
    Batch batch = ragged_batch(head_size);
    static std::vector<double> references[257];
    std::vector<double>& rows = references[head_size];
    if (rows.empty()) rows = reference(batch, {});
    for (const int32_t block_size : {8, 16, 32, 64}) {
      for (const DType dtype : kDTypes) {
        for (const KvDType kv_dtype : kKvDTypes) {
          batch.block_size = block_size;
          batch.dtype = dtype;
          batch.kv_dtype = kv_dtype;
          batch.memory = combination++ % 2 == 0 ? Memory::kHeap : Memory::kGuarded;
          PagedBatch paged(batch);
          expect(paged.run({}) == 0, "paged_attention status");
          paged.compare(rows, "paged_attention value");
        }
      }
    }
  }
}

void test_attention_options() {
  const Options all_options[] = {{5, 0.0f, false, false},
                                 {-1, 2.0f, false, false},
                                 {-1, 0.0f, true, false},
                                 {-1, 0.0f, false, true},
                                 {20, 3.0f, true, true}};
  for (const Options& options : all_options) {
    Batch batch = ragged_batch(64);
    const std::vector<double> rows = reference(batch, options);
    for (const DType dtype : kDTypes) {
      for (const KvDType kv_dtype : kKvDTypes) {
        batch.dtype = dtype;
        batch.kv_dtype = kv_dtype;
        batch.memory = Memory::kGuarded;
        PagedBatch paged(batch);
        expect(paged.run(options) == 0, "paged_attention status with options");
        paged.compare(rows, "paged_attention value with options");
      }
    }
  }
}

void test_attention_refuses() {
  PagedBatch paged(ragged_batch(64));
  const auto refuses = [&](auto change, const char* word) {
    PagedAttentionParams p = paged.params();
    change(p);
    expect(pagemill_paged_attention(&p) != 0 && std::strstr(pagemill_last_error(), word) != nullptr, word);
  };
  refuses([](auto& p) { p.head_size = 72; }, "head_size 72");
  refuses([](auto& p) { p.block_size = 12; }, "block_size 12");
  refuses([](auto& p) { p.num_query_heads = 7; }, "num_query_heads 7");
  refuses([](auto& p) { p.kv_dtype = static_cast<KvDType>(3); }, "kv_dtype 3");
  refuses([](auto& p) { p.num_blocks = 1; }, "block_tables");
  refuses([](auto& p) { p.num_tokens = 3; }, "query_start");
  refuses([](auto& p) { p.max_blocks = 1; }, "context_lens");
}

}  // namespace pagemill::test
