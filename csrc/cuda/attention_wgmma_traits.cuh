// Sizes of the warp-group prefill kernel, its shared memory, and what its parts tell each other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "pagemill/attention_plan.h"

namespace pagemill::cuda::wgmma {

// One producer warp group, each of whose warps has a part, and consumers of 64 query rows each.
constexpr int kGroupThreads = 128;
constexpr int kNumConsumers = 2;
constexpr int kGroupRows = 64;
// Registers of a thread, out of 65,536 for all.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kNumThreads = (1 + kNumConsumers) * kGroupThreads;
constexpr int kGroupWarps = kGroupThreads / 32;
constexpr int kConsumerWarps = kNumConsumers * kGroupWarps;
constexpr int kQueryRows = kNumConsumers * kGroupRows;
static_assert(kQueryRows == kPrefillTileQueries);

// Tiles in shared memory are cut into chunks of columns as wide as the swizzle; 8 rows of a chunk are an atom. K and V:
// [row / 8][chunk][8][chunk columns], so that the 8 rows of a page that lie together in memory lie together here and
// one copy brings a page. Q: [chunk][row][chunk columns].
template <typename T_, int kHeadSize_, int kKeyTile_, class Scores_>
struct Traits {
  using T = T_;
  using Scores = Scores_;
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kKeyTile = kKeyTile_;
  static constexpr int kChunk = kHeadSize % 64 == 0 ? 64 : kHeadSize % 32 == 0 ? 32 : 16;
  static constexpr int kNumChunks = kHeadSize / kChunk;
  static constexpr int kSwizzleBytes = kChunk * int{sizeof(T)};
  static constexpr int kAtomBytes = 8 * kSwizzleBytes;
  static constexpr int kRowGroupBytes = kNumChunks * kAtomBytes;
  static constexpr int kRowBytes = kHeadSize * int{sizeof(T)};
  static constexpr int kQueryChunkBytes = kQueryRows * kSwizzleBytes;
  static constexpr int kQueryBytes = kQueryRows * kRowBytes;
  static constexpr int kStageBytes = kKeyTile * kRowBytes;
  static constexpr int kNumStages = 2;  // of K, and as many of V
  // Tiles of queries. With two the next one is there when this one ends, and their products overlap.
  static constexpr int kNumQueries = kHeadSize < 256 ? 2 : 1;
  static constexpr bool kCrossesItems = kNumQueries == 2;
  static constexpr int kDynamicBytes = kNumQueries * kQueryBytes + 2 * kNumStages * kStageBytes;
  static constexpr int kAlignment = 1024;  // of the widest swizzle's pattern

  // Place of 16 bytes in a tile of queries or outputs; `column` in units of 16 bytes.
  __device__ __forceinline__ static uint32_t query_offset(int row, int column) {
    constexpr int kPerChunk = kSwizzleBytes / 16;
    constexpr uint32_t kMask = kSwizzleBytes - 16;
    const uint32_t in_chunk = row * kSwizzleBytes + column % kPerChunk * 16;
    return column / kPerChunk * kQueryChunkBytes + (in_chunk ^ (in_chunk >> 3 & kMask));
  }
  static_assert(kStageBytes % kAlignment == 0 && kQueryBytes % kAlignment == 0 && kKeyTile % 16 == 0);
};

// One query head of one plan tile. The producer leaves it beside the queries; num_queries is 0 after the last item.
struct WorkItem {
  int32_t head;
  int32_t token;               // row of `query` of the tile's first query
  int32_t num_queries;         // none is stored where it is negative
  int32_t first_position;      // of the tile's first query in its sequence
  int32_t begin_key, end_key;  // keys that some query of the tile sees
  int32_t table_row;           // row of block_tables
};

struct Barriers {
  uint64_t query_full[2], query_empty[2];
  uint64_t key_full[2], key_empty[2];
  uint64_t value_full[2], value_empty[2];
  WorkItem items[2];
};

// Place in a ring of buffers and the parity of its current round.
template <int kSize>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct KernelParams {
  void* out;
  float* lse;
  const int32_t* plan;
  const int32_t* block_tables;
  const int32_t* seq_slots;
  const int32_t* query_start;
  const float* alibi_slopes;
  const float* sinks;
  int32_t* counter;  // of work items given out; 0 before and after a launch
  int64_t out_token_stride, out_head_stride, block_table_stride, num_table_rows, max_blocks;
  int32_t num_query_heads, num_kv_heads, group, heads_per_round, block_shift, box_rows, window;
  float scale, scale_log2, soft_cap;
};

}  // namespace pagemill::cuda::wgmma
