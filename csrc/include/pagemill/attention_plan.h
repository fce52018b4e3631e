// How one step's attention is cut into work for a GPU: made on the host once a step, copied to the device, read by
// every layer's launch. No kernel needs a host value that changes from step to step, so that launches can be captured
// in a CUDA graph whose plan buffer is rewritten before each replay.
//
// A plan is one array of int32: PlanHeader, then the sections that it points to (offsets count int32 from the start).
//   decode entries  [num_entries] DecodeEntry: at most 16 query rows of one sequence, where a row is one of the query
//                   heads that share a KV head, of one new token (row = token * group + head in group)
//   tile starts     [num_entries + 1]: prefix sums of the entries' key tiles (of kDecodeTileKeys keys)
//   prefill tiles   [num_prefill_tiles] PrefillTile, costliest first; every query head runs each
#pragma once

#include <cstdint>

namespace pagemill {

constexpr int32_t kDecodeTileKeys = 64;
constexpr int32_t kDecodeTileRows = 16;
// A sequence with at most this many rows (new tokens times group) is served by the decode kernel, others by prefill.
constexpr int32_t kDecodeMaxRows = 64;
constexpr int32_t kPrefillTileQueries = 128;

struct DecodeEntry {
  int32_t seq;         // index in query_start and context_lens
  int32_t first_row;   // of the sequence's rows
  int32_t num_rows;    // 1 .. kDecodeTileRows
  int32_t first_tile;  // key tile at which the entry begins; not 0 where a sliding window has left keys behind
};

struct PrefillTile {
  int32_t seq;
  int32_t first_query;  // of the sequence's new tokens
  int32_t num_queries;  // 1 .. kPrefillTileQueries
  int32_t end_key;      // keys that the tile's last query sees: 0 .. end_key - 1, or fewer from the left by the window
};

struct PlanHeader {
  int32_t num_entries, entries_offset, tile_starts_offset;
  int32_t num_tiles;  // of all entries, for one KV head
  // v2: tiles of one piece of work. Balanced: all (entry, KV head, tile) in a row are cut into num_workers pieces of this
  // many tiles, so that a piece may cover parts of several entries. Fixed: each (entry, KV head) is cut into pieces of
  // this many tiles, and a result does not depend on the batch. v1: 0, one piece for each (entry, KV head).
  int32_t tiles_per_piece;
  int32_t is_balanced;
  int32_t num_prefill_tiles, prefill_offset;
  int32_t reserved[8];
};
static_assert(sizeof(PlanHeader) == 16 * sizeof(int32_t));

enum class AttentionVersion : int32_t { kAuto = 0, kV1 = 1, kV2 = 2 };

struct AttentionPlanParams {
  const int32_t* query_start;   // host [num_seqs + 1]
  const int32_t* context_lens;  // host [num_seqs]
  int32_t num_seqs, num_query_heads, num_kv_heads;
  int32_t window;       // as in PagedAttentionParams
  int32_t num_workers;  // thread blocks of the decode kernel that are resident at once
  AttentionVersion version;
  int32_t partition_keys;  // v2: 0 balances over the workers; otherwise a multiple of kDecodeTileKeys
};

// What the host must know to launch. Captured launches stay valid for any plan with the same flags and a workspace as
// large.
struct AttentionLaunch {
  const int32_t* plan;      // device
  void* workspace;          // device, zeroed once before its first use; kernels leave it reusable
  int64_t workspace_bytes;  // capacity
  int32_t num_workers;      // as planned
  int32_t version;          // 1 or 2
  bool has_decode, has_prefill;
};

struct AttentionPlanResult {
  int64_t plan_ints;        // length of the plan
  int64_t workspace_bytes;  // needed by a launch
  int32_t version;          // 1 or 2
  bool has_decode, has_prefill;
};

}  // namespace pagemill

extern "C" {

// Writes the plan to `plan` where it fits into `capacity` (int32), and in any case its length to `result`. Returns 0, or
// non-zero with a message in pagemill_last_error() for a batch or option that is not supported. Part of the CPU library.
int pagemill_plan_attention(const pagemill::AttentionPlanParams* params, int32_t head_size, int32_t* plan,
                            int64_t capacity, pagemill::AttentionPlanResult* result);
}
