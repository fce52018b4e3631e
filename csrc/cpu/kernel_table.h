// The bodies that exist once per instruction set. Each works on a range of rows or on one task and starts no threads:
// splitting work over threads is done once, in code that every processor can run.
#pragma once

#include <cstdint>

#include "pagemill/params.h"

namespace pagemill {

// Keys are folded into a query's result partition by partition, in order, whoever computes the partitions. A constant,
// so that results depend neither on the number of threads nor on the batch.
constexpr int kPartitionKeys = 512;
constexpr int kMaxHeadSize = 256;
constexpr int64_t kVocabGroup = 64;

// One tile of queries of one sequence and one KV head, over a range of partitions. The rows of a tile are (token,
// query head of the group) pairs, heads fastest.
struct AttentionTask {
  int32_t seq, kv_head;
  int32_t first_row, num_rows;  // of num_new_tokens * group_size
  int32_t first_partition, num_partitions;
};

// What the same thread has just done and is about to do, or null: a task finds its first keys in the cache where one
// came before, and brings those of the next one there.
struct NearTasks {
  const AttentionTask* before;
  const AttentionTask* after;
};

struct AttentionSizes {
  int32_t tile_rows;      // most rows of a task
  int32_t row_multiple;   // a partial result holds whole multiples of so many rows
  int64_t scratch_bytes;  // for one task, aligned to 64; 0: the head size is not supported
  int64_t row_floats;     // of one row in the partial result of one partition

  int64_t partial_floats(int32_t num_rows) const {
    return (num_rows + row_multiple - 1) / row_multiple * row_multiple * row_floats;
  }
};

struct VocabStats {
  float maximum;
  int64_t argmax;  // first index of the maximum
  bool valid;      // no NaN, no +inf, not all -inf
};

struct KernelTable {
  void (*rms_norm_rows)(const RmsNormParams&, int64_t begin, int64_t end);
  void (*rotary_rows)(const RotaryParams&, int64_t begin, int64_t end);
  void (*activation_rows)(const ActivationParams&, int64_t begin, int64_t end);
  void (*merge_attention_rows)(const MergeAttentionParams&, int64_t begin, int64_t end);
  // out[i] = x[i] / scale, in 8 bits
  void (*quantize_kv)(const void* x, DType dtype, int64_t n, float scale, KvDType kv_dtype, void* out);

  AttentionSizes (*attention_sizes)(const PagedAttentionParams&);
  // partials == nullptr: the task holds all partitions of its tile and writes the output. Otherwise the partial of
  // partition first_partition + i goes to partials + i * sizes.partial_floats(task.num_rows).
  void (*attention_task)(const PagedAttentionParams&, const AttentionTask&, const NearTasks&, float* partials,
                         void* scratch);
  // Folds the partials of all partitions of a tile, in order, and writes the output.
  void (*attention_fold)(const PagedAttentionParams&, const AttentionTask&, const float* partials, void* scratch);

  VocabStats (*vocab_stats)(const void* logits, DType dtype, int64_t vocab_size);
  // sum of exp(logit - maximum)
  double (*vocab_sum_exp)(const void* logits, DType dtype, int64_t vocab_size, float maximum);
  int64_t (*vocab_count_greater)(const void* logits, DType dtype, int64_t vocab_size, float threshold);
  void (*vocab_to_float)(const void* logits, DType dtype, int64_t vocab_size, float* out);
  // weights[i] = exp((x[i] - maximum) * inverse_temperature)
  void (*vocab_weights)(const float* x, int64_t vocab_size, float maximum, float inverse_temperature, float* weights);
  // maxima[i]: the largest of the i-th kVocabGroup numbers
  void (*vocab_group_maxima)(const float* x, int64_t n, float* maxima);
  // Places of all x[i] >= least in ascending order, as many as are returned; places has room for n. No NaN.
  int64_t (*vocab_collect)(const float* x, int64_t n, float least, int32_t* places);
  // buckets[i] = min((maximum - x[i]) * scale, last), rounded down
  void (*vocab_buckets)(const float* x, int64_t n, float maximum, float scale, int32_t last, int32_t* buckets);
};

const KernelTable& kernel_table_portable();
const KernelTable& kernel_table_avx2();
const KernelTable& kernel_table_avx512();
const KernelTable& kernel_table_avx512bf16();
const KernelTable& kernel_table_amx();

// The table for cpu_isa().
const KernelTable& kernel_table();

}  // namespace pagemill
