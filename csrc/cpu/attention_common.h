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

// Where the vectors of one sequence and KV head lie in the two caches; Kv is the type of a number there.
template <typename Kv>
struct CachePages {
  const Kv* keys;
  const Kv* values;
  const int32_t* block_table;
  int64_t block_stride;  // numbers between a head's pages in consecutive blocks
  int32_t page_shift, head_size;

  // Of the vector of one key. Vectors of one page lie behind each other.
  PAGEMILL_INLINE int64_t offset(int32_t key) const {
    const int64_t in_page = key & ((1 << page_shift) - 1);
    return block_table[key >> page_shift] * block_stride + in_page * head_size;
  }
};

template <typename Kv>
PAGEMILL_INLINE CachePages<Kv> cache_pages(const PagedAttentionParams& p, const SequenceView& seq, int32_t kv_head) {
  const int64_t page = int64_t{p.block_size} * p.head_size;
  return {static_cast<const Kv*>(p.key_cache) + kv_head * page,
          static_cast<const Kv*>(p.value_cache) + kv_head * page,
          seq.block_table,
          p.num_kv_heads * page,
          __builtin_ctz(static_cast<unsigned>(p.block_size)),
          p.head_size};
}

}  // namespace
}  // namespace pagemill
