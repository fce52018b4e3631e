// What all attention kernels share: where rows and keys lie, and which keys a row sees.
#pragma once

#include "kernel_table.h"
#include "simd.h"

namespace pagemill {
namespace {

// Below every real score, yet finite: differences of maxima stay defined for a row that has seen no key.
constexpr float kNoMaximum = -1e30f;

struct SequenceView {
  const int32_t* block_table;
  int32_t first_token;     // row of query and out
  int32_t first_position;  // of the first new token
  int32_t context_len;
};

PAGEMILL_INLINE SequenceView sequence_view(const PagedAttentionParams& p, int32_t seq) {
  const int64_t table_row = p.seq_slots != nullptr ? p.seq_slots[seq] : seq;
  const int32_t num_new = p.query_start[seq + 1] - p.query_start[seq];
  return {p.block_tables + table_row * p.block_table_stride, p.query_start[seq], p.context_lens[seq] - num_new,
          p.context_lens[seq]};
}

// Keys [begin, end) that at least one row of a task sees.
struct KeyRange {
  int32_t begin, end;
};

PAGEMILL_INLINE KeyRange key_range(const PagedAttentionParams& p, const SequenceView& seq, const AttentionTask& task,
                                   int32_t group) {
  const int32_t first = seq.first_position + task.first_row / group;
  const int32_t last = seq.first_position + (task.first_row + task.num_rows - 1) / group;
  const int32_t begin = p.window >= 0 && first - p.window + 1 > 0 ? first - p.window + 1 : 0;
  return {begin, last + 1};
}

// The address of a key or value vector.
template <typename T>
PAGEMILL_INLINE const T* cache_row(const PagedAttentionParams& p, const void* cache, const SequenceView& seq,
                                   int32_t kv_head, int32_t key) {
  const int64_t block = seq.block_table[key / p.block_size];
  const int64_t offset = key % p.block_size;
  return static_cast<const T*>(cache) + ((block * p.num_kv_heads + kv_head) * p.block_size + offset) * p.head_size;
}

}  // namespace
}  // namespace pagemill
