// Kernels that treat each row on its own: norms, rotary embedding, activations, copies.
#include <algorithm>
#include <cstring>

#include "error.h"
#include "kernel_table.h"
#include "pagemill/kernels.h"
#include "pagemill/thread_pool.h"

namespace pagemill {
namespace {

// Bytes touched below which a second thread costs more than it saves, and the size of a chunk above.
constexpr int64_t kInlineBytes = 64 << 10;
constexpr int64_t kChunkBytes = 32 << 10;

template <typename Body>
void for_row_ranges(int64_t num_rows, int64_t row_bytes, Body body) {
  if (num_rows * row_bytes <= kInlineBytes) {
    if (num_rows > 0) body(int64_t{0}, num_rows);
    return;
  }
  const int64_t rows_per_chunk = std::max<int64_t>(1, kChunkBytes / std::max<int64_t>(row_bytes, 1));
  const int64_t chunks = (num_rows + rows_per_chunk - 1) / rows_per_chunk;
  parallel_for(chunks, [&](int64_t chunk, int) {
    const int64_t begin = chunk * rows_per_chunk;
    body(begin, std::min(begin + rows_per_chunk, num_rows));
  });
}

int64_t index_at(const void* ids, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// The first index outside [0, limit), or -1.
int64_t find_outside(const void* ids, bool is_int64, int64_t count, int64_t limit) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = index_at(ids, is_int64, i);
    if (id < 0 || id >= limit) return i;
  }
  return -1;
}

int check_block_ids(const char* name, const int64_t* ids, int64_t count, int64_t num_blocks) {
  const int64_t bad = find_outside(ids, true, count, num_blocks);
  if (bad < 0) return 0;
  return fail("%s[%lld] is %lld, outside the cache's %lld blocks", name, static_cast<long long>(bad),
              static_cast<long long>(ids[bad]), static_cast<long long>(num_blocks));
}

int check_positions(const RotaryParams& p) {
  const int64_t bad = find_outside(p.positions, p.positions_are_int64, p.num_tokens, p.max_positions);
  if (bad < 0) return 0;
  return fail("positions[%lld] is %lld, outside the %lld rows of cos_sin", static_cast<long long>(bad),
              static_cast<long long>(index_at(p.positions, p.positions_are_int64, bad)),
              static_cast<long long>(p.max_positions));
}

int check_store(const StoreKvParams& p) {
  if (p.kv_dtype != KvDType::kActivation && p.kv_dtype != KvDType::kFp8E4M3 && p.kv_dtype != KvDType::kFp8E5M2) {
    return fail("kv_dtype %d is not supported: 0 (the activations'), 1 (e4m3), 2 (e5m2) are",
                static_cast<int>(p.kv_dtype));
  }
  const int64_t num_slots = p.num_blocks * p.block_size;
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    if (p.slot_mapping[i] >= num_slots || p.slot_mapping[i] < -1) {
      return fail("slot_mapping[%lld] is %lld, but the cache has %lld slots (-1 skips a token)",
                  static_cast<long long>(i), static_cast<long long>(p.slot_mapping[i]),
                  static_cast<long long>(num_slots));
    }
  }
  return 0;
}

// One of the two caches, and what is written to it.
struct StoreSide {
  const char* source;
  char* cache;
  const float* scale;
  int64_t token_bytes, head_bytes;  // between the source's tokens and heads
};

void store_rows(const StoreKvParams& p, int64_t begin, int64_t end) {
  const KernelTable& table = kernel_table();
  const int64_t bytes = dtype_bytes(p.dtype);
  const int64_t target_bytes = p.head_size * kv_bytes(p.kv_dtype, p.dtype);
  const StoreSide sides[] = {
      {static_cast<const char*>(p.key), static_cast<char*>(p.key_cache), p.key_scale, p.key_token_stride * bytes,
       p.key_head_stride * bytes},
      {static_cast<const char*>(p.value), static_cast<char*>(p.value_cache), p.value_scale,
       p.value_token_stride * bytes, p.value_head_stride * bytes},
  };
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    for (int64_t head = 0; head < p.num_kv_heads; ++head) {
      const int64_t target = ((block * p.num_kv_heads + head) * p.block_size + offset) * target_bytes;
      for (const StoreSide& side : sides) {
        const char* source = side.source + token * side.token_bytes + head * side.head_bytes;
        if (p.kv_dtype == KvDType::kActivation) {
          std::memcpy(side.cache + target, source, static_cast<size_t>(target_bytes));
        } else {
          const float scale = side.scale != nullptr ? side.scale[head] : 1.0f;
          table.quantize_kv(source, p.dtype, p.head_size, scale, p.kv_dtype, side.cache + target);
        }
      }
    }
  }
}

int64_t rotary_row_bytes(const RotaryParams& p) {
  return int64_t{p.num_query_heads + p.num_kv_heads} * p.head_size * dtype_bytes(p.dtype);
}

}  // namespace
}  // namespace pagemill

extern "C" {

using namespace pagemill;

int pagemill_rms_norm(const RmsNormParams* params) {
  const RmsNormParams& p = *params;
  const KernelTable& table = kernel_table();
  const int64_t residual_bytes = p.residual != nullptr ? dtype_bytes(p.residual_dtype) : 0;
  for_row_ranges(p.num_tokens, p.hidden * (dtype_bytes(p.dtype) + dtype_bytes(p.x_dtype) + residual_bytes),
                 [&](int64_t begin, int64_t end) { table.rms_norm_rows(p, begin, end); });
  return 0;
}

int pagemill_rotary(const RotaryParams* params) {
  const RotaryParams& p = *params;
  if (const int error = check_positions(p)) return error;
  const KernelTable& table = kernel_table();
  for_row_ranges(p.num_tokens, rotary_row_bytes(p),
                 [&](int64_t begin, int64_t end) { table.rotary_rows(p, begin, end); });
  return 0;
}

int pagemill_rope_and_store(const RotaryParams* rotary, const StoreKvParams* store) {
  if (const int error = check_positions(*rotary)) return error;
  if (const int error = check_store(*store)) return error;
  const KernelTable& table = kernel_table();
  for_row_ranges(rotary->num_tokens, rotary_row_bytes(*rotary), [&](int64_t begin, int64_t end) {
    table.rotary_rows(*rotary, begin, end);
    store_rows(*store, begin, end);
  });
  return 0;
}

int pagemill_store_kv(const StoreKvParams* params) {
  const StoreKvParams& p = *params;
  if (const int error = check_store(p)) return error;
  for_row_ranges(p.num_tokens, int64_t{4} * p.num_kv_heads * p.head_size * dtype_bytes(p.dtype),
                 [&](int64_t begin, int64_t end) { store_rows(p, begin, end); });
  return 0;
}

int pagemill_activation_and_mul(const ActivationParams* params) {
  const ActivationParams& p = *params;
  const KernelTable& table = kernel_table();
  for_row_ranges(p.num_tokens, p.size * dtype_bytes(p.dtype) * 3,
                 [&](int64_t begin, int64_t end) { table.activation_rows(p, begin, end); });
  return 0;
}

int pagemill_gather_rows(const GatherRowsParams* params) {
  const GatherRowsParams& p = *params;
  const int64_t bad = find_outside(p.ids, p.ids_are_int64, p.num_rows, p.num_table_rows);
  if (bad >= 0) {
    return fail("ids[%lld] is %lld, outside the table's %lld rows", static_cast<long long>(bad),
                static_cast<long long>(index_at(p.ids, p.ids_are_int64, bad)),
                static_cast<long long>(p.num_table_rows));
  }
  const KernelTable& table = kernel_table();
  for_row_ranges(p.num_rows, p.row_bytes * 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      char* out = static_cast<char*>(p.out) + row * p.out_stride_bytes;
      const char* source =
          static_cast<const char*>(p.table) + index_at(p.ids, p.ids_are_int64, row) * p.table_stride_bytes;
      if (p.is_widening) {
        table.vocab_to_float(source, p.dtype, p.row_bytes / dtype_bytes(p.dtype), reinterpret_cast<float*>(out));
      } else {
        std::memcpy(out, source, static_cast<size_t>(p.row_bytes));
      }
    }
  });
  return 0;
}

int pagemill_merge_attention(const MergeAttentionParams* params) {
  const MergeAttentionParams& p = *params;
  const KernelTable& table = kernel_table();
  for_row_ranges(p.num_rows, 3 * p.head_size * dtype_bytes(p.dtype),
                 [&](int64_t begin, int64_t end) { table.merge_attention_rows(p, begin, end); });
  return 0;
}

int pagemill_copy_blocks(const CopyBlocksParams* params) {
  const CopyBlocksParams& p = *params;
  if (const int error = check_block_ids("sources", p.sources, p.num_copies, p.num_blocks)) return error;
  if (const int error = check_block_ids("destinations", p.destinations, p.num_copies, p.num_blocks)) return error;
  // A cache is one chunk: its copies run in order, so a block copied to may be a later copy's source.
  const auto copy_in_cache = [&](int64_t cache) {
    char* base = static_cast<char*>(p.caches[cache]);
    for (int64_t i = 0; i < p.num_copies; ++i) {
      std::memmove(base + p.destinations[i] * p.block_bytes, base + p.sources[i] * p.block_bytes,
                   static_cast<size_t>(p.block_bytes));
    }
  };
  if (p.num_copies == 0) return 0;
  parallel_for(p.num_caches, [&](int64_t cache, int) { copy_in_cache(cache); });
  return 0;
}

int pagemill_swap_blocks(const SwapBlocksParams* params) {
  const SwapBlocksParams& p = *params;
  if (p.direction != SwapDirection::kToHost && p.direction != SwapDirection::kToDevice) {
    return fail("direction %d is not supported: 0 (to host memory), 1 (from it) are", static_cast<int>(p.direction));
  }
  if (const int error = check_block_ids("blocks", p.blocks, p.num_copies, p.num_blocks)) return error;
  if (const int error = check_block_ids("host_blocks", p.host_blocks, p.num_copies, p.num_host_blocks)) return error;
  if (p.num_copies == 0) return 0;
  parallel_for(p.num_caches, [&](int64_t cache, int) {
    for (int64_t i = 0; i < p.num_copies; ++i) {
      char* block = static_cast<char*>(p.caches[cache]) + p.blocks[i] * p.block_bytes;
      char* host_block = static_cast<char*>(p.host_caches[cache]) + p.host_blocks[i] * p.block_bytes;
      const bool is_to_host = p.direction == SwapDirection::kToHost;
      std::memcpy(is_to_host ? host_block : block, is_to_host ? block : host_block, static_cast<size_t>(p.block_bytes));
    }
  });
  return 0;
}
}
