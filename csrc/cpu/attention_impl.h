// Attention in float32, for the instruction set of the including file.
//
// Lanes are query rows: scores and values are held transposed, [key][row] and [dim][row], so the softmax needs no
// horizontal operation and one broadcast of a key or value element serves all rows of the tile. A row's result is the
// same whatever other rows share the tile: prefill, chunked prefill and decode agree bit for bit.
#pragma once

#include "attention_common.h"
#include "elementwise_impl.h"
#include "kv_format.h"

namespace pagemill {
namespace {

constexpr int kBlockKeys = 32;
constexpr int kMaxVectors = 2;  // of rows in a tile

// Scratch of one task; rows of all matrices are kRows = vectors * W wide.
template <int kHeadSize, int kRows>
struct TileScratch {
  alignas(64) float query[kHeadSize][kRows];
  alignas(64) float scores[kBlockKeys][kRows];
  alignas(64) float keys[kBlockKeys][kHeadSize];
  alignas(64) float values[kBlockKeys][kHeadSize];
  alignas(64) float part[2 + kHeadSize][kRows];   // maximum, sum, values of one partition
  alignas(64) float total[2 + kHeadSize][kRows];  // the same, over all partitions so far
  alignas(64) float first_key[kRows];             // of the keys that a row sees
  alignas(64) float end_key[kRows];
  alignas(64) float position[kRows];
  alignas(64) float slope[kRows];
  alignas(64) float row_out[kHeadSize];
};

template <int kRows>
PAGEMILL_INLINE void fold_partition(float (*total)[kRows], const float (*part)[kRows], int head_size) {
  for (int r = 0; r < kRows; r += W) {
    const VecF old_max = load(total[0] + r), part_max = load(part[0] + r);
    const VecF new_max = max(old_max, part_max);
    const VecF old_scale = exp2(old_max - new_max), part_scale = exp2(part_max - new_max);
    store(total[0] + r, new_max);
    for (int d = 1; d < 2 + head_size; ++d) {
      store(total[d] + r, fma(load(part[d] + r), part_scale, load(total[d] + r) * old_scale));
    }
  }
}

template <int kRows>
PAGEMILL_INLINE void clear_partition(float (*part)[kRows], int head_size) {
  for (int r = 0; r < kRows; r += W) {
    store(part[0] + r, set1(kNoMaximum));
    for (int d = 1; d < 2 + head_size; ++d) store(part[d] + r, zero());
  }
}

// Attention of one element type, head size and tile width.
template <typename T, int kHeadSize, int kVectors>
struct AttentionTile {
  static constexpr int kRows = kVectors * W;
  using Scratch = TileScratch<kHeadSize, kRows>;

  const PagedAttentionParams& p;
  const AttentionTask& task;
  Scratch& s;
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  const SequenceView seq = sequence_view(p, task.seq);
  const float key_scale = p.key_scale != nullptr ? p.key_scale[task.kv_head] : 1.0f;
  const float value_scale = p.value_scale != nullptr ? p.value_scale[task.kv_head] : 1.0f;

  PAGEMILL_INLINE int32_t query_head(int row) const { return task.kv_head * group + (task.first_row + row) % group; }
  PAGEMILL_INLINE int32_t token(int row) const { return (task.first_row + row) / group; }

  void load_queries() {
    // Scores are kept in units of log2, so that weights are powers of two.
    const bool plain = p.soft_cap == 0.0f;
    const float factor = p.scale * key_scale * (plain ? kLog2E : 1.0f);
    for (int row = 0; row < kRows; ++row) {
      const bool used = row < task.num_rows;
      const int32_t position = used ? seq.first_position + token(row) : 0;
      s.position[row] = static_cast<float>(position);
      s.end_key[row] = used ? static_cast<float>(position + 1) : 0.0f;
      s.first_key[row] = p.window >= 0 ? static_cast<float>(position - p.window + 1) : 0.0f;
      s.slope[row] = used && p.alibi_slopes != nullptr ? p.alibi_slopes[query_head(row)] * kLog2E : 0.0f;
      const T* q = nullptr;
      if (used) {
        q = static_cast<const T*>(p.query) + (seq.first_token + token(row)) * p.query_token_stride +
            query_head(row) * p.query_head_stride;
      }
      for (int d = 0; d < kHeadSize; ++d) s.query[d][row] = used ? to_float(q[d]) * factor : 0.0f;
    }
  }

  // Behind the window pages may have been given back, so keys before `begin` are not read.
  template <typename Kv>
  PAGEMILL_INLINE void load_block_of(int32_t first_key, int32_t begin, int32_t end) {
    const CachePages<Kv> pages = cache_pages<Kv>(p, seq, task.kv_head);
    for (int i = 0; i < kBlockKeys; ++i) {
      if (first_key + i >= end || first_key + i < begin) {
        for (int d = 0; d < kHeadSize; d += W) {
          store(s.keys[i] + d, zero());
          store(s.values[i] + d, zero());
        }
        continue;
      }
      const int64_t offset = pages.offset(first_key + i);
      const Kv* key = pages.keys + offset;
      const Kv* value = pages.values + offset;
      for (int d = 0; d < kHeadSize; d += W) {
        store(s.keys[i] + d, load(key + d));
        store(s.values[i] + d, load(value + d));
      }
    }
  }

  void load_block(int32_t first_key, int32_t begin, int32_t end) {
    with_kv_type<T>(p.kv_dtype, [&](auto number) { load_block_of<decltype(number)>(first_key, begin, end); });
  }

  PAGEMILL_INLINE void score_block() {
    constexpr int kKeys = 4;
    for (int i = 0; i < kBlockKeys; i += kKeys) {
      VecF sum[kKeys][kVectors];
      for (int k = 0; k < kKeys; ++k) {
        for (int v = 0; v < kVectors; ++v) sum[k][v] = zero();
      }
      for (int d = 0; d < kHeadSize; ++d) {
        VecF q[kVectors];
        for (int v = 0; v < kVectors; ++v) q[v] = load(s.query[d] + v * W);
        for (int k = 0; k < kKeys; ++k) {
          const VecF key = set1(s.keys[i + k][d]);
          for (int v = 0; v < kVectors; ++v) sum[k][v] = fma(key, q[v], sum[k][v]);
        }
      }
      for (int k = 0; k < kKeys; ++k) {
        for (int v = 0; v < kVectors; ++v) store(s.scores[i + k] + v * W, sum[k][v]);
      }
    }
  }

  void cap_block() {
    const VecF inverse = set1(1.0f / p.soft_cap), cap = set1(p.soft_cap * kLog2E);
    for (int i = 0; i < kBlockKeys; ++i) {
      for (int r = 0; r < kRows; r += W) store(s.scores[i] + r, tanh(load(s.scores[i] + r) * inverse) * cap);
    }
  }

  void bias_block(int32_t first_key) {
    for (int i = 0; i < kBlockKeys; ++i) {
      const VecF key = set1(static_cast<float>(first_key + i));
      for (int r = 0; r < kRows; r += W) {
        store(s.scores[i] + r, fma(load(s.slope + r), key - load(s.position + r), load(s.scores[i] + r)));
      }
    }
  }

  PAGEMILL_INLINE void mask_block(int32_t first_key) {
    const VecF none = set1(-__builtin_inff());
    for (int i = 0; i < kBlockKeys; ++i) {
      const VecF key = set1(static_cast<float>(first_key + i));
      for (int r = 0; r < kRows; r += W) {
        VecF score = select_less(key, load(s.end_key + r), load(s.scores[i] + r), none);
        score = select_less(key, load(s.first_key + r), none, score);
        store(s.scores[i] + r, score);
      }
    }
  }

  PAGEMILL_INLINE void weigh_block() {
    for (int r = 0; r < kRows; r += W) {
      const VecF old_max = load(s.part[0] + r);
      VecF new_max = old_max;
      for (int i = 0; i < kBlockKeys; ++i) new_max = max(load(s.scores[i] + r), new_max);
      VecF sum = zero();
      for (int i = 0; i < kBlockKeys; ++i) {
        const VecF weight = exp2(load(s.scores[i] + r) - new_max);
        sum = sum + weight;
        store(s.scores[i] + r, weight);
      }
      const VecF scale = exp2(old_max - new_max);
      store(s.part[0] + r, new_max);
      store(s.part[1] + r, fma(load(s.part[1] + r), scale, sum));
      for (int d = 0; d < kHeadSize; ++d) store(s.part[2 + d] + r, load(s.part[2 + d] + r) * scale);
    }
  }

  PAGEMILL_INLINE void add_values() {
    constexpr int kDims = 4;
    for (int d = 0; d < kHeadSize; d += kDims) {
      VecF sum[kDims][kVectors];
      for (int j = 0; j < kDims; ++j) {
        for (int v = 0; v < kVectors; ++v) sum[j][v] = load(s.part[2 + d + j] + v * W);
      }
      for (int i = 0; i < kBlockKeys; ++i) {
        VecF weight[kVectors];
        for (int v = 0; v < kVectors; ++v) weight[v] = load(s.scores[i] + v * W);
        for (int j = 0; j < kDims; ++j) {
          const VecF value = set1(s.values[i][d + j]);
          for (int v = 0; v < kVectors; ++v) sum[j][v] = fma(value, weight[v], sum[j][v]);
        }
      }
      for (int j = 0; j < kDims; ++j) {
        for (int v = 0; v < kVectors; ++v) store(s.part[2 + d + j] + v * W, sum[j][v]);
      }
    }
  }

  void run_partition(int32_t partition, KeyRange range) {
    clear_partition<kRows>(s.part, kHeadSize);
    const int32_t first = partition * kPartitionKeys;
    const int32_t end = first + kPartitionKeys < range.end ? first + kPartitionKeys : range.end;
    // Every row sees the keys in [all_begin, all_end): only blocks outside need the mask.
    const bool full_tile = task.num_rows == kRows;
    const int32_t all_end = full_tile ? seq.first_position + token(0) + 1 : 0;
    const int32_t all_begin = p.window >= 0 ? seq.first_position + token(task.num_rows - 1) - p.window + 1 : 0;
    for (int32_t key = first; key < end; key += kBlockKeys) {
      if (key + kBlockKeys <= range.begin) continue;
      load_block(key, range.begin, end);
      score_block();
      if (p.soft_cap != 0.0f) cap_block();
      if (p.alibi_slopes != nullptr) bias_block(key);
      if (key + kBlockKeys > all_end || key < all_begin) mask_block(key);
      weigh_block();
      add_values();
    }
  }

  void write_output() {
    for (int row = 0; row < task.num_rows; ++row) {
      const int32_t head = query_head(row);
      const int64_t out_token = seq.first_token + token(row);
      float maximum = s.total[0][row], sum = s.total[1][row], scale = 1.0f;
      if (p.sinks != nullptr) {
        const float sink = p.sinks[head] * kLog2E;
        const float new_max = sink > maximum ? sink : maximum;
        scale = ::exp2f(maximum - new_max);
        sum = sum * scale + ::exp2f(sink - new_max);
        maximum = new_max;
      }
      const float inverse = sum > 0.0f ? scale / sum * value_scale : 0.0f;
      for (int d = 0; d < kHeadSize; ++d) s.row_out[d] = s.total[2 + d][row] * inverse;
      T* out = static_cast<T*>(p.out) + out_token * p.out_token_stride + head * p.out_head_stride;
      for (int d = 0; d < kHeadSize; d += W) store(out + d, load(s.row_out + d));
      if (p.lse != nullptr) p.lse[out_token * p.num_query_heads + head] = (maximum + ::log2f(sum)) * kLn2;
    }
  }

  void run(float* partials, int64_t partial_floats) {
    const KeyRange range = key_range(p, seq, task, group);
    load_queries();
    clear_partition<kRows>(s.total, kHeadSize);
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      run_partition(task.first_partition + i, range);
      if (partials != nullptr) {
        __builtin_memcpy(partials + i * partial_floats, s.part, sizeof(s.part));
      } else {
        fold_partition<kRows>(s.total, s.part, kHeadSize);
      }
    }
    if (partials == nullptr) write_output();
  }

  void fold(const float* partials, int64_t partial_floats) {
    clear_partition<kRows>(s.total, kHeadSize);
    for (int32_t i = 0; i < task.num_partitions; ++i) {
      __builtin_memcpy(s.part, partials + i * partial_floats, sizeof(s.part));
      fold_partition<kRows>(s.total, s.part, kHeadSize);
    }
    write_output();
  }
};

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// Calls the functor with the head size as a constant; false where it is not supported. Builds that check every access
// leave out sizes that take no other way through the code than these two: whole chunks of 32, and a part of one.
template <typename Functor>
PAGEMILL_INLINE bool with_head_size(int32_t head_size, Functor functor) {
  switch (head_size) {
    case 64:
      return functor(Constant<64>{}), true;
    case 80:
      return functor(Constant<80>{}), true;
#if !defined(PAGEMILL_FEW_HEAD_SIZES)
    case 96:
      return functor(Constant<96>{}), true;
    case 112:
      return functor(Constant<112>{}), true;
    case 128:
      return functor(Constant<128>{}), true;
    case 192:
      return functor(Constant<192>{}), true;
    case 256:
      return functor(Constant<256>{}), true;
#endif
    default:
      return false;
  }
}

AttentionSizes float_attention_sizes(const PagedAttentionParams& p) {
  AttentionSizes sizes{kMaxVectors * W, kMaxVectors * W, 0, int64_t{2} + p.head_size};
  with_head_size(p.head_size, [&](auto head_size) {
    sizes.scratch_bytes = sizeof(TileScratch<decltype(head_size)::value, kMaxVectors * W>);
  });
  return sizes;
}

template <typename Functor>
PAGEMILL_INLINE void with_attention_tile(const PagedAttentionParams& p, const AttentionTask& task, void* scratch,
                                         Functor functor) {
  with_element_type(p.dtype, [&](auto element) {
    with_head_size(p.head_size, [&](auto head_size) {
      constexpr int kHeadSize = decltype(head_size)::value;
      if (task.num_rows <= W) {
        using Tile = AttentionTile<decltype(element), kHeadSize, 1>;
        functor(Tile{p, task, *static_cast<typename Tile::Scratch*>(scratch)});
      } else {
        using Tile = AttentionTile<decltype(element), kHeadSize, kMaxVectors>;
        functor(Tile{p, task, *static_cast<typename Tile::Scratch*>(scratch)});
      }
    });
  });
}

int64_t float_partial_floats(const PagedAttentionParams& p) { return int64_t{kMaxVectors} * W * (2 + p.head_size); }

void float_attention_task(const PagedAttentionParams& p, const AttentionTask& task, const NearTasks&, float* partials,
                          void* scratch) {
  with_attention_tile(p, task, scratch, [&](auto tile) { tile.run(partials, float_partial_floats(p)); });
}

void float_attention_fold(const PagedAttentionParams& p, const AttentionTask& task, const float* partials,
                          void* scratch) {
  with_attention_tile(p, task, scratch, [&](auto tile) { tile.fold(partials, float_partial_floats(p)); });
}

}  // namespace
}  // namespace pagemill
