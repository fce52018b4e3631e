// Attention on products of bfloat16 pairs, for caches in bfloat16 and 8 bits.
//
// A task's rows are taken in groups of 16, its keys in blocks of 128. Keys and values of a block are brought into pair
// layout once for all rows: K^T as [key / 16][dim / 32][pair of dims][key][2], V as [key / 32][dim][pair of keys][2].
// The products differ between instruction sets and come as a policy; scores and sums of any number of rows must come
// out of it by the same operations in the same order. Everything else treats each row on its own, so that a row's
// result is the same whatever other rows share the task.
#pragma once

#include <type_traits>

#include "attention_bf16_weights.h"

namespace pagemill {
namespace {

template <typename Kv, int kHeadSize, typename Products>
struct Bf16AttentionTile {
  using Shape = Bf16Shape<kHeadSize>;
  using Scratch = Bf16Scratch<kHeadSize>;
  using RowGroup = typename Shape::RowGroup;
  using Weights = typename Shape::Weights;
  static constexpr int kSize = kHeadSize;
  static constexpr int kChunks = Shape::kChunks;
  static constexpr int kPaddedSize = Shape::kPaddedSize;

  const PagedAttentionParams& p;
  const AttentionTask& task;
  const NearTasks& near;
  Scratch& s;
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  const SequenceView seq = sequence_view(p, task.seq);
  const CachePages<Kv> pages = cache_pages<Kv>(p, seq, task.kv_head);
  const float key_scale = p.key_scale != nullptr ? p.key_scale[task.kv_head] : 1.0f;
  const float value_scale = p.value_scale != nullptr ? p.value_scale[task.kv_head] : 1.0f;
  // Scores are multiplied by this to be in units of log2; 1 where adjust_scores has done it already.
  const bool plain = p.soft_cap == 0.0f && p.alibi_slopes == nullptr && p.scale * key_scale > 0.0f;
  const float factor = plain ? p.scale * key_scale * kLog2E : 1.0f;
  const bool has_few_rows = Products::kTakesFewRows && task.num_rows <= 16;
  const int num_groups = (task.num_rows + kGroupRows - 1) / kGroupRows;

  PAGEMILL_INLINE int32_t query_head(int row) const { return task.kv_head * group + (task.first_row + row) % group; }
  PAGEMILL_INLINE int32_t token(int row) const { return (task.first_row + row) / group; }
  PAGEMILL_INLINE int32_t position(int row) const { return seq.first_position + token(row); }

  void load_queries() {
    for (int row = 0; row < num_groups * kGroupRows; ++row) {
      auto& query = s.groups[row / kGroupRows].query;
      if (row >= task.num_rows) {
        for (int c = 0; c < kChunks; ++c) _mm512_store_si512(query[c][row % kGroupRows], _mm512_setzero_si512());
        continue;
      }
      const auto* q = static_cast<const BFloat16*>(p.query) +
                      int64_t{seq.first_token + token(row)} * p.query_token_stride +
                      query_head(row) * p.query_head_stride;
      for (int c = 0; c < kChunks; ++c) _mm512_store_si512(query[c][row % kGroupRows], load_chunk(q, c));
    }
  }

  template <typename T>
  static PAGEMILL_INLINE __m512i load_chunk(const T* row, int chunk) {
    if constexpr (kHeadSize % 32 != 0) {
      if (chunk == kChunks - 1) return load_bf16(row + chunk * 32, Shape::kLastMask);
    }
    return load_bf16(row + chunk * 32);
  }

  // The block's keys that exist for the task: [begin, end), counted from its first.
  struct BlockKeys {
    int32_t first, begin, end;
    PAGEMILL_INLINE int num_subs() const { return (end + kSubKeys - 1) / kSubKeys; }
  };

  // Behind the window pages may have been given back, and slots past the end may hold anything: neither is read.
  using Rows = const Kv* [16];
  PAGEMILL_INLINE void row_addresses(const BlockKeys& keys, const Kv* cache, int first, Rows& rows) const {
    const Kv* none = reinterpret_cast<const Kv*>(s.zeros);
    for (int run = 0; run < 16; run += 8) {
      const int lowest = first + run;
      const bool exists = lowest + 8 > keys.begin && lowest < keys.end;
      const Kv* base = exists ? cache + pages.offset(keys.first + lowest) : none;
      for (int i = 0; i < 8; ++i) rows[run + i] = base + i * kHeadSize;
      if (lowest >= keys.begin && lowest + 8 <= keys.end) continue;
      for (int i = 0; i < 8; ++i) {
        if (lowest + i < keys.begin || lowest + i >= keys.end) rows[run + i] = none;
      }
    }
  }

  // Keys [first, end) that come into the cache while a block of keys before them is worked on.
  struct KeysAhead {
    CachePages<Kv> pages;
    int32_t first, end;
  };

  PAGEMILL_INLINE KeysAhead keys_of(const AttentionTask& other) const {
    const SequenceView view = sequence_view(p, other.seq);
    const KeyRange range = key_range(p, view, other, group);
    const int32_t begin = range.begin / kKeyBlock * kKeyBlock, first = other.first_partition * kPartitionKeys;
    const int32_t end = first + other.num_partitions * kPartitionKeys;
    return {cache_pages<Kv>(p, view, other.kv_head), first > begin ? first : begin, end < range.end ? end : range.end};
  }

  // The task's own next block, or behind its last one the first of the task that follows.
  PAGEMILL_INLINE KeysAhead keys_ahead(int32_t block, int32_t end) const {
    if (block + kKeyBlock < end) return {pages, block + kKeyBlock, end};
    return near.after != nullptr ? keys_of(*near.after) : KeysAhead{pages, 0, 0};
  }

  // Pages lie anywhere in memory, so the hardware cannot guess the next ones. One of num_parts parts of 32 keys.
  PAGEMILL_INLINE void prefetch_part(const KeysAhead& ahead, const Kv* cache, int sub, int part, int num_parts) const {
    constexpr int kRunBytes = 8 * kHeadSize * static_cast<int>(sizeof(Kv));
    const int part_bytes = kRunBytes / num_parts;
    const int32_t first = ahead.first + sub * kSubKeys;
    for (int32_t key = first; key < first + kSubKeys && key < ahead.end; key += 8) {
      const char* run = reinterpret_cast<const char*>(cache + ahead.pages.offset(key)) + part * part_bytes;
      for (int i = 0; i < part_bytes; i += 64) _mm_prefetch(run + i, _MM_HINT_T1);
    }
  }

  // In the cache where tiles can read them there; otherwise copied, with zeros for what does not exist.
  PAGEMILL_INLINE KeyTile key_tile(const BlockKeys& keys, int tile) {
    Rows rows;
    if constexpr (std::is_same_v<Kv, BFloat16> && kHeadSize % 32 == 0) {
      const int32_t first = tile * 16;
      if (pages.page_shift >= 4 && first < keys.end && first + 16 > keys.begin) {
        return {pages.keys + pages.offset(keys.first + first), kHeadSize * 2};
      }
    }
    row_addresses(keys, pages.keys, tile * 16, rows);
    auto* copy = &s.block.keys[tile][0][0][0];
    for (int i = 0; i < 16; ++i) {
      for (int c = 0; c < kChunks; ++c) _mm512_store_si512(copy + i * kPaddedSize + c * 32, load_chunk(rows[i], c));
    }
    return {copy, kPaddedSize * 2};
  }

  PAGEMILL_INLINE void prepare_keys(const BlockKeys& keys, int tile) {
    Rows rows;
    row_addresses(keys, pages.keys, tile * 16, rows);
    for (int c = 0; c < kChunks; ++c) {
      __m512i r[16];
      for (int i = 0; i < 16; ++i) r[i] = load_chunk(rows[i], c);
      transpose_16x16(r);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(s.block.keys[tile][c][i], r[i]);
    }
  }

  // Sixteen keys, half a sub-block. Row i of tile 2 c are dims 32 c + 8 (i / 4) + i % 4, and of tile 2 c + 1 those
  // plus 4: the order in which unpacking leaves them, undone when the output is written.
  PAGEMILL_INLINE void prepare_values(const BlockKeys& keys, int tile) {
    Rows rows;
    row_addresses(keys, pages.values, tile * 16, rows);
    auto& values = s.block.values[tile / 2];
    const int first_pair = tile % 2 * 8;
    for (int c = 0; c < kChunks; ++c) interleave(rows, c, values + 2 * c, first_pair);
  }

  // Eight pairs of rows into two tiles.
  static PAGEMILL_INLINE void interleave(const Rows& rows, int chunk, uint16_t (*tiles)[16][32], int first_pair) {
    for (int pair = 0; pair < 8; ++pair) {
      const __m512i a = load_chunk(rows[2 * pair], chunk), b = load_chunk(rows[2 * pair + 1], chunk);
      _mm512_store_si512(tiles[0][first_pair + pair], _mm512_unpacklo_epi16(a, b));
      _mm512_store_si512(tiles[1][first_pair + pair], _mm512_unpackhi_epi16(a, b));
    }
  }

  // The same, while the rows from `next` on come into the cache: a few lines at a time, so that they do not keep the
  // loads waiting.
  PAGEMILL_INLINE void interleave_and_prefetch(const Rows& rows, int chunk, uint16_t (*tiles)[16][32], int first_pair,
                                               const KeysAhead& ahead, int32_t next) const {
    for (int run = 0; run < 2; ++run) {
      const bool exists = next + run * 8 < ahead.end;
      const Kv* row = exists ? ahead.pages.values + ahead.pages.offset(next + run * 8) : rows[run * 8];
      row += chunk * 32;
      for (int pair = run * 4; pair < run * 4 + 4; ++pair, row += 2 * kHeadSize) {
        const __m512i a = load_chunk(rows[2 * pair], chunk), b = load_chunk(rows[2 * pair + 1], chunk);
        _mm_prefetch(reinterpret_cast<const char*>(row), _MM_HINT_T1);
        _mm_prefetch(reinterpret_cast<const char*>(row + kHeadSize), _MM_HINT_T1);
        _mm512_store_si512(tiles[0][first_pair + pair], _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(tiles[1][first_pair + pair], _mm512_unpackhi_epi16(a, b));
      }
    }
  }

  PAGEMILL_INLINE int rows_of(int group_index) const {
    const int left = task.num_rows - group_index * kGroupRows;
    return left < kGroupRows ? left : kGroupRows;
  }

  // How many sub-blocks a group sees of a block; 0: the group passes the block over.
  PAGEMILL_INLINE int subs_of(int group_index, const BlockKeys& keys) const {
    const int first_row = group_index * kGroupRows;
    const int32_t end = position(first_row + rows_of(group_index) - 1) + 1 - keys.first;
    if (end <= 0 || (p.window >= 0 && position(first_row) - p.window + 1 >= keys.first + kKeyBlock)) return 0;
    const int seen = (end + kSubKeys - 1) / kSubKeys;
    return seen < keys.num_subs() ? seen : keys.num_subs();
  }

  // One block for few rows, whose products read the keys where they lie.
  PAGEMILL_INLINE void run_block_of_few_rows(const BlockKeys& keys, const KeysAhead& ahead) {
    Rows value_rows[kKeyTiles];
    for (int i = 0; i < 2 * keys.num_subs(); ++i) row_addresses(keys, pages.values, i * 16, value_rows[i]);
    Products::score_few_rows(*this, keys, value_rows, ahead);
    weigh_rows(*this, 0, keys.first);
    Products::values_of_few_rows(*this, keys, value_rows, ahead);
    s.groups[0].started = true;
  }

  void run_block(const BlockKeys& keys, const KeysAhead& ahead) {
    if constexpr (Products::kTakesFewRows) {
      if (has_few_rows) return run_block_of_few_rows(keys, ahead);
    }
    for (int sub = 0; sub < keys.num_subs(); ++sub) {
      for (int tile = 2 * sub; tile < 2 * sub + 2; ++tile) {
        prefetch_part(ahead, ahead.pages.keys, sub, tile % 2, 2);
        prepare_keys(keys, tile);
        prefetch_part(ahead, ahead.pages.values, sub, tile % 2, 2);
        prepare_values(keys, tile);
      }
    }
    Products::run_groups(*this, keys);
  }

  void run_partition(int32_t partition, KeyRange range, int32_t task_end) {
    for (int i = 0; i < num_groups; ++i) s.groups[i].clear();
    const int32_t first = partition * kPartitionKeys;
    const int32_t end = first + kPartitionKeys < range.end ? first + kPartitionKeys : range.end;
    for (int32_t block = first; block < end; block += kKeyBlock) {
      if (block + kKeyBlock <= range.begin) continue;
      const int32_t begin_key = range.begin > block ? range.begin - block : 0;
      run_block({block, begin_key, end - block < kKeyBlock ? end - block : kKeyBlock}, keys_ahead(block, task_end));
    }
  }

  // A row of a partial result: its sums over values, then maximum and sum of weights. Rows that the partition's keys
  // are hidden from have a maximum that gives them no weight.
  PAGEMILL_INLINE void save_partial(float* partial) const {
    for (int row = 0; row < task.num_rows; ++row, partial += kPartialRowFloats<kHeadSize>) {
      const RowGroup& g = s.groups[row / kGroupRows];
      const int local = row % kGroupRows;
      for (int d = 0; d < kPaddedSize; d += 16) {
        _mm512_storeu_ps(partial + d, g.started ? _mm512_load_ps(g.out[local] + d) : _mm512_setzero_ps());
      }
      partial[kPaddedSize] = g.reference[local];
      partial[kPaddedSize + 1] = _mm512_reduce_add_ps(_mm512_load_ps(g.sums[local]));
    }
  }

  PAGEMILL_INLINE void fold_partition() {
    for (int i = 0; i < num_groups; ++i) {
      const RowGroup& g = s.groups[i];
      if (!g.started) continue;
      PartialRows part{g.out[0], kPaddedSize};
      for (int row = 0; row < rows_of(i); ++row) {
        part.reference[row] = g.reference[row];
        part.sum[row] = reduce_add(load(g.sums[row]));
      }
      s.totals.fold(i * kGroupRows, rows_of(i), part);
    }
  }

  void write_output() {
    for (int row = 0; row < task.num_rows; ++row) {
      const int32_t head = query_head(row);
      const int64_t out_token = seq.first_token + token(row);
      float maximum = s.totals.maximum[row], sum = s.totals.sum[row], scale = 1.0f;
      if (p.sinks != nullptr) {
        const float sink = p.sinks[head] * kLog2E;
        const float new_max = sink > maximum ? sink : maximum;
        scale = ::exp2f(maximum - new_max);
        sum = sum * scale + ::exp2f(sink - new_max);
        maximum = new_max;
      }
      if (p.lse != nullptr) p.lse[out_token * p.num_query_heads + head] = (maximum + ::log2f(sum)) * kLn2;
      auto* out = static_cast<BFloat16*>(p.out) + out_token * p.out_token_stride + head * p.out_head_stride;
      s.totals.write_row(row, sum > 0.0f ? scale / sum * value_scale : 0.0f, out);
    }
  }

  void run(float* partials) {
    const FlushSubnormals flush;
    [[maybe_unused]] const typename Products::Session session{};
    const KeyRange range = key_range(p, seq, task, group);
    for (int c = 0; c < kChunks; ++c) _mm512_store_si512(s.zeros + c * 32, _mm512_setzero_si512());
    load_queries();
    if constexpr (Products::kTakesFewRows) {
      if (has_few_rows) Products::template prepare_few_rows<kHeadSize>(s);
    }
    s.totals.clear(num_groups * kGroupRows);
    const KeysAhead own = keys_of(task);
    for (int sub = 0; near.before == nullptr && sub < kSubBlocks; ++sub) {
      prefetch_part(own, pages.keys, sub, 0, 1);
      prefetch_part(own, pages.values, sub, 0, 1);
    }
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      run_partition(task.first_partition + i, range, own.end);
      if (partials != nullptr) {
        save_partial(partials + i * task.num_rows * kPartialRowFloats<kHeadSize>);
      } else {
        fold_partition();
      }
    }
    if (partials == nullptr) write_output();
  }

  void fold(const float* partials) {
    const FlushSubnormals flush;
    s.totals.clear(num_groups * kGroupRows);
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      const float* rows = partials + i * task.num_rows * kPartialRowFloats<kHeadSize>;
      for (int j = 0; j < num_groups; ++j, rows += kGroupRows * kPartialRowFloats<kHeadSize>) {
        PartialRows part{rows, kPartialRowFloats<kHeadSize>};
        for (int row = 0; row < rows_of(j); ++row) {
          part.reference[row] = rows[row * kPartialRowFloats<kHeadSize> + kPaddedSize];
          part.sum[row] = rows[row * kPartialRowFloats<kHeadSize> + kPaddedSize + 1];
        }
        s.totals.fold(j * kGroupRows, rows_of(j), part);
      }
    }
    write_output();
  }
};

}  // namespace
}  // namespace pagemill
