// Which key tiles a thread block reads, in which order, and how they get into shared memory.
#pragma once

#include "attention_decode_ptx.cuh"
#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda::decode {

enum class Cache { k16Bit, kE4M3, kE5M2 };

// Whether the shallow ring that fits every device is also the fastest where there is room for a deeper one: it leaves
// more of the first-level cache.
constexpr bool has_shallow_ring(int head_size, Cache cache) {
  return head_size == 128 || (head_size < 128 && cache != Cache::k16Bit);
}

template <typename T, int kHeadSizeValue, Cache kCacheValue, int kWarpsValue, int kStagesValue>
struct Config {
  using Query = T;
  static constexpr int kHeadSize = kHeadSizeValue;
  static constexpr Cache kCache = kCacheValue;
  static constexpr int kWarps = kWarpsValue;
  static constexpr int kStages = kStagesValue;
  static constexpr bool kIs8Bit = kCache != Cache::k16Bit;
  static constexpr bool kHasShallowRing = has_shallow_ring(kHeadSize, kCache);
  // An 8-bit cache is widened to float16, which holds its numbers exactly.
  using Operand = std::conditional_t<kIs8Bit, __half, T>;

  static constexpr int kRowBytes = kHeadSize * (kIs8Bit ? 1 : 2);
  static constexpr int kRowChunks = kRowBytes / 16;
  // A tile of keys (or values) lies in panels of 128 bytes a row, where chunk c of 16 bytes of row r is at c ^ (r & 7):
  // so matrix loads meet no bank conflict.
  static constexpr int kPanels = (kRowBytes + 127) / 128;
  static constexpr int kPanelBytes = kDecodeTileKeys * 128;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRingBytes = kWarps * kStages * kStageBytes;

  // Tiles that are weighed together. 8-bit tiles are half the bytes, so that they would cost twice as much each byte.
  static constexpr int kStepTiles = kIs8Bit && kStages > 2 && kHeadSize <= 192 ? 2 : 1;

  static constexpr int kJoinRows = 8;
  static constexpr int kJoinFloats = kWarps * kJoinRows * kHeadSize;
  static constexpr int kSharedBytes = kRingBytes + kJoinFloats * 4 + kWarps * kJoinRows * 2 * 4 + 16;
};

struct Arguments {
  PagedAttentionParams p;
  const int32_t* plan;
  int32_t* counters;
  float* partials;
  float inverse_group;
  int32_t group;
  int32_t block_size_log2;
  uint32_t block_bytes;
};

__device__ __forceinline__ DecodeEntry load_entry(const int32_t* plan, int32_t offset) {
  const int4* source = reinterpret_cast<const int4*>(plan + offset);
  const int4 a = __ldg(source), b = __ldg(source + 1), c = __ldg(source + 2);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w, c.x, c.y, c.z, 0};
}

__device__ __forceinline__ DecodeRange load_range(const int32_t* plan, int32_t index) {
  const int32_t offset = static_cast<int32_t>(sizeof(PlanHeader) / 4 + index * (sizeof(DecodeRange) / 4));
  const int4* rest = reinterpret_cast<const int4*>(plan + offset + sizeof(DecodeEntry) / 4);
  const int4 a = __ldg(rest), b = __ldg(rest + 1);
  return {load_entry(plan, offset), a.x, a.y, a.z, a.w, b.x, b.y, b.z, 0};
}

// A row's token in its sequence. Exact for the few rows that there are.
__device__ __forceinline__ int32_t token_of(const Arguments& a, int32_t row) {
  return static_cast<int32_t>((static_cast<float>(row) + 0.5f) * a.inverse_group);
}

// The segments of one range, in order.
struct Walk {
  DecodeEntry entry;
  int32_t entry_index, kv_head;
  int32_t begin, end;  // tiles of the segment, from the entry's first
  int32_t left;        // tiles of the range after the segment
  int32_t piece_tiles;
  bool in_first_pair;

  __device__ __forceinline__ void start(const DecodeRange& range, int32_t piece) {
    entry = range.entry;
    entry_index = range.entry_index;
    kv_head = range.kv_head;
    begin = range.tile;
    left = range.num_tiles;
    piece_tiles = piece;
    in_first_pair = true;
    clip();
  }

  __device__ __forceinline__ void clip() {
    end = min(entry.num_tiles, begin + left);
    if (piece_tiles != 0) end = min(end, (begin / piece_tiles + 1) * piece_tiles);
    left -= end - begin;
  }

  __device__ __forceinline__ bool next(const Arguments& a) {
    if (left <= 0) return false;
    begin = end;
    if (begin == entry.num_tiles) {
      begin = 0;
      in_first_pair = false;
      if (++kv_head == a.p.num_kv_heads) {
        kv_head = 0;
        ++entry_index;
        const int32_t offset = __ldg(a.plan + 1) + entry_index * static_cast<int32_t>(sizeof(DecodeEntry) / 4);
        entry = load_entry(a.plan, offset);
      }
    }
    clip();
    return true;
  }
};

// One tile to copy. Rows [low, high) of it hold keys that are seen.
struct Request {
  int32_t block0, block1;  // of its keys 0-7 and 8-15; -1: none is seen
  int32_t row;             // of the first key in its block, counting from the block's first row
  int32_t low, high;
  bool is_valid;
};

// Walks ahead of the computation by the depth of the ring.
template <typename C>
struct Feed {
  Walk walk;
  const int32_t* table;
  int32_t tile;
  bool has_more;

  __device__ __forceinline__ void enter_entry(const Arguments& a) {
    const int64_t row = a.p.seq_slots != nullptr ? __ldg(a.p.seq_slots + walk.entry.seq) : walk.entry.seq;
    table = a.p.block_tables + row * a.p.block_table_stride;
  }

  __device__ __forceinline__ void start(const Arguments& a, const DecodeRange& range, int32_t piece, int32_t warp) {
    walk.start(range, piece);
    tile = walk.begin + warp;
    has_more = range.num_tiles > 0;
    enter_entry(a);
  }

  // Reads block ids early: whoever calls leaves time before issue() needs them.
  __device__ __forceinline__ Request prepare(const Arguments& a, int32_t warp) {
    while (has_more && tile >= walk.end) {
      const int32_t entry_index = walk.entry_index;
      has_more = walk.next(a);
      if (walk.entry_index != entry_index) enter_entry(a);
      tile = walk.begin + warp;
    }
    Request r{-1, -1, 0, 0, 0, has_more};
    if (!has_more) return r;
    const int32_t key = (walk.entry.first_tile + tile) * kDecodeTileKeys;
    tile += C::kWarps;
    const int32_t index = key >> a.block_size_log2;
    r.low = max(0, walk.entry.begin_key - key);
    r.high = min(kDecodeTileKeys, walk.entry.end_key - key);
    r.row = (walk.kv_head << a.block_size_log2) + (key & (a.p.block_size - 1));
    if (a.block_size_log2 >= 4) {
      r.block0 = r.block1 = __ldg(table + index);
    } else {
      if (r.low < 8) r.block0 = __ldg(table + index);
      if (r.high > 8) r.block1 = __ldg(table + index + 1);
    }
#if defined(PAGEMILL_DEVICE_CHECKS)
    const bool is_bad0 = (r.low < 8 || a.block_size_log2 >= 4) && (r.block0 < 0 || r.block0 >= a.p.num_blocks);
    const bool is_bad1 = r.high > 8 && (r.block1 < 0 || r.block1 >= a.p.num_blocks);
    if (is_bad0 || is_bad1) __trap();
#endif
    return r;
  }
};

// Where a tile lies in a cache, and how a lane copies its part: chunks lane, lane + 32, ... of 16 bytes, which lie in a
// row in memory within 8 keys.
template <typename C>
struct TileSource {
  static constexpr int kChunks = C::kRowChunks;
  static constexpr int kTotal = kDecodeTileKeys * kChunks;
  static constexpr int kCopies = (kTotal + 31) / 32;
  // A copy of the warp is whole rows, a power of two of them: a lane's row and column then differ from copy to copy by
  // constants, in the swizzled place too.
  static constexpr bool kIsRegular = kChunks <= 32 && 32 % kChunks == 0;
  int64_t first, second;  // bytes from the cache's start to the lane's part of keys 0-7, and of 8-15 less 8 rows

  __device__ __forceinline__ TileSource(const Arguments& a, const Request& r, int32_t lane) {
    const uint32_t in_block = static_cast<uint32_t>(r.row * C::kRowBytes + lane * 16);
    first = static_cast<uint64_t>(static_cast<uint32_t>(max(r.block0, 0))) * a.block_bytes + in_block;
    second = first;
    if (a.block_size_log2 < 4) {
      second = static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(max(r.block1, 0))) * a.block_bytes) +
               in_block - 8 * C::kRowBytes;
    }
  }

  __device__ __forceinline__ static uint32_t place(int32_t i) {
    const int32_t row = i / kChunks, chunk = i % kChunks;
    return (chunk / 8) * C::kPanelBytes + row * 128 + (((chunk % 8) ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void copy_whole(const void* cache, uint32_t shared, int32_t lane) const {
    const char* const low = static_cast<const char*>(cache) + first;
    const char* const high = static_cast<const char*>(cache) + second;
    if constexpr (kIsRegular) {
      constexpr int kRows = 32 / kChunks;
      const uint32_t target = shared + place(lane);
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        copy_async((target ^ ((kRows * j & 7) << 4)) + kRows * j * 128, (kRows * j < 8 ? low : high) + j * 512);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCopies; ++j) {
        const int32_t i = lane + 32 * j;
        if (kTotal % 32 != 0 && i >= kTotal) break;
        copy_async(shared + place(i), (i < 8 * kChunks ? low : high) + j * 512);
      }
    }
  }

  // Keys that are not seen become zeros.
  __device__ __forceinline__ void copy_seen(const void* cache, const Request& r, uint32_t shared, int32_t lane) const {
    const char* const low = static_cast<const char*>(cache) + first;
    const char* const high = static_cast<const char*>(cache) + second;
#pragma unroll 1
    for (int i = lane; i < kTotal; i += 32) {
      const int32_t row = i / kChunks;
      const char* const source = (row < 8 ? low : high) + (i - lane) * 16;
      copy_async_or_zero(shared + place(i), source, row >= r.low && row < r.high ? 16 : 0);
    }
  }
};

}  // namespace pagemill::cuda::decode
