// How the work of the mma prefill is cut: blocks, warps, items.
#pragma once

#include "attention_mma_loader.cuh"
#include "pagemill/attention_plan.h"

namespace pagemill::cuda::mma {

// By shared memory of a multiprocessor: 228 KB from sm_90 on, 164 KB of sm_80 and 87, 100 KB of the others.
enum class Chip : int { kLarge = 1, kMedium = 2, kSmall = 4 };
constexpr int kEveryChip = 7;

// architecture: 90 for sm_90.
__host__ __device__ constexpr Chip chip_of(int architecture) {
  if (architecture >= 90) return Chip::kLarge;
  return architecture == 80 || architecture == 87 ? Chip::kMedium : Chip::kSmall;
}

// How a block is cut, and what lies in its shared memory: queries, and two tiles of keys and of values; or, of an 8-bit
// cache, one of each and one of each as the cache has it. With two row tiles to a warp a fragment of keys feeds twice
// the products, which the bandwidth of shared memory asks for; above head size 128 the accumulators leave room for one
// only, and queries stay in registers.
// kChips_: which chips the tiling is for; others get no code of it.
template <int kHeadSize_, int kWarps_, int kRowTiles_, int kKeys_, int kMinBlocks_, int kChips_ = kEveryChip>
struct Tiling {
  static constexpr int kChips = kChips_;
  static constexpr int kHeadSize = kHeadSize_, kWarps = kWarps_, kRowTiles = kRowTiles_;
  static constexpr int kKeys = kKeys_, kMinBlocks = kMinBlocks_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr bool kQueryInRegisters = kRowTiles == 1;
  static constexpr int kSteps = kHeadSize / 16;  // of 16 dimensions
  static constexpr int kColumnTiles = kKeys / 8, kOutTiles = kHeadSize / 8;
  static constexpr int kRowBytes = RowLayout<kHeadSize>::kRowBytes;
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kPrefillTileQueries * kRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;
  static constexpr int kRawBytes = kKeys * kHeadSize;  // of a tile of 8-bit numbers
  static_assert(kWarps * kWarpRows == kPrefillTileQueries && kKeys % 16 == 0);
  static_assert(kTileBytes % 128 == 0 && kQueryBytes % 128 == 0);

  template <bool kIs8Bit>
  static constexpr int shared_bytes() {
    return kQueryBytes + (kIs8Bit ? 2 * kTileBytes + 2 * kRawBytes : 4 * kTileBytes);
  }
};

// What one block computes at a time: a prefill tile and a query head.
struct Item {
  int32_t head, kv_head;
  int32_t first_token;  // row of query and out
  int32_t num_queries;
  int32_t first_position;  // of first_token in its sequence
  int32_t begin_key, end_key;
  const int32_t* table;
};

template <typename Tile>
__device__ inline Item find_item(const PagedAttentionParams& p, const int32_t* plan, int index) {
  const int32_t offset = reinterpret_cast<const PlanHeader*>(plan)->prefill_offset;
  const PrefillTile tile = reinterpret_cast<const PrefillTile*>(plan + offset)[index / p.num_query_heads];
  Item item;
  item.head = index % p.num_query_heads;
  item.kv_head = item.head / (p.num_query_heads / p.num_kv_heads);
  item.num_queries = tile.num_queries;
  const int32_t start = p.query_start[tile.seq], num_new = p.query_start[tile.seq + 1] - start;
  const int32_t slot = p.seq_slots != nullptr ? p.seq_slots[tile.seq] : tile.seq;
  item.first_token = start + tile.first_query;
  item.first_position = p.context_lens[tile.seq] - num_new + tile.first_query;
  item.end_key = item.first_position + item.num_queries;
  item.begin_key = p.window >= 0 ? max(0, item.first_position - p.window + 1) / Tile::kKeys * Tile::kKeys : 0;
  item.table = p.block_tables + slot * p.block_table_stride;
  return item;
}

// The page of a key, or -1. Debug builds stop at one outside the pool.
__device__ inline int32_t find_page(const PagedAttentionParams& p, const Item& item, int key) {
  const int block = key >> (31 - __clz(p.block_size));
  if (key >= item.end_key || block >= static_cast<int32_t>(p.max_blocks)) return -1;
  const int32_t page = item.table[block];
#if defined(PAGEMILL_DEVICE_CHECKS)
  if (page >= p.num_blocks || (page < 0 && p.window < 0)) __trap();
#endif
  return page;
}

}  // namespace pagemill::cuda::mma
