// How one step's attention is cut into work for a GPU: made on the host once a step, copied to the device, read by
// every layer's launch. No kernel needs a host value that changes from step to step, so that launches can be captured
// in a CUDA graph whose plan buffer is rewritten before each replay.
//
// A plan is one array of int32: PlanHeader, then the sections that it points to (offsets count int32 from the start).
//   decode ranges   [num_ranges] DecodeRange, straight after the header
//   decode entries  [num_entries] DecodeEntry: at most 16 query rows of one sequence, where a row is one of the query
//                   heads that share a KV head, of one new token (row = token * group + head in group)
//   prefill tiles   [num_prefill_tiles] PrefillTile, costliest first; every query head runs each
//
// Decode work in a row is: for each entry, for each KV head, the entry's key tiles. It is cut into ranges. A worker (a
// thread block) begins with the range of its own number and takes further ones, where there are, in the order in which
// workers become free: multiprocessors differ in how fast they read memory. The part of a range that lies in one
// (entry, KV head) is a segment; where a segment is not the whole of an (entry, KV head) its result is a partial one,
// which goes to the workspace and is joined with the others by the worker that finishes last. Who does what never shows
// in a result.
#pragma once

#include <cstdint>

namespace pagemill {

constexpr int32_t kDecodeTileKeys = 16;
constexpr int32_t kDecodeTileRows = 16;
// A sequence with at most this many rows (new tokens times group) is served by the decode kernel, others by prefill.
constexpr int32_t kDecodeMaxRows = 64;
constexpr int32_t kPrefillTileQueries = 128;
constexpr int32_t kDecodeMaxWorkers = 4096;
constexpr int32_t kDecodeMaxRanges = 16384;

struct DecodeEntry {
  int32_t seq;             // row of context_lens and seq_slots
  int32_t first_token;     // query_start[seq]
  int32_t first_position;  // of the sequence's first new token: context_lens[seq] less the new tokens
  int32_t first_row;       // of the sequence's rows
  int32_t num_rows;        // 1 .. kDecodeTileRows
  int32_t first_tile;      // key tile at which the entry begins; not 0 where a sliding window has left keys behind
  int32_t num_tiles;
  int32_t first_piece;         // pieces of all entries and KV heads before this entry, where piece_tiles is not 0
  int32_t begin_key, end_key;  // keys that at least one row sees
  int32_t all_end;             // every row sees the keys before it, but for those that the window has left behind
  int32_t reserved;
};

struct DecodeRange {
  DecodeEntry entry;    // where the range begins: a copy, which saves a dependent read
  int32_t entry_index;  // of that entry
  int32_t kv_head;
  int32_t tile;       // counts from the entry's first_tile
  int32_t num_tiles;  // of the range; 0: nothing to do
  // Ranges that have a part of this range's first (entry, KV head): the first of them, and how many. Of the last one
  // the first is this range itself, unless it is the same as the first.
  int32_t first_owner, first_sharers, last_sharers;
  int32_t reserved;
};

struct PrefillTile {
  int32_t seq;
  int32_t first_query;  // of the sequence's new tokens
  int32_t num_queries;  // 1 .. kPrefillTileQueries
  int32_t end_key;      // keys that the tile's last query sees: 0 .. end_key - 1, or fewer from the left by the window
};

struct PlanHeader {
  int32_t num_entries, entries_offset;
  int32_t num_ranges, ranges_offset;  // at least as many as workers
  int32_t num_tiles;                  // of all entries, for one KV head
  // v2 with a fixed partition: each (entry, KV head) is cut into pieces of this many tiles, each with a partial result
  // of its own, so that a result does not depend on the batch. Otherwise 0.
  int32_t piece_tiles;
  int32_t max_rows;  // largest num_rows of an entry
  int32_t version;   // 1: no (entry, KV head) is cut; 2: where it pays
  int32_t num_prefill_tiles, prefill_offset;
  int32_t reserved[6];
};
static_assert(sizeof(PlanHeader) == 16 * sizeof(int32_t));
static_assert(sizeof(DecodeEntry) == 12 * sizeof(int32_t));
static_assert(sizeof(DecodeRange) == 20 * sizeof(int32_t));

// The workspace begins with a counter for each range and one for the next range to take, which are 0 between launches.
// Partial results follow: [rows][head size] weighted sums of values, then [rows] maxima in units of log2, then [rows]
// sums of weights, all float32, with rows = max_rows. Their slots: piece numbers with a fixed partition; otherwise 2 r
// + 1 for range r that begins an (entry, KV head) and does not end it, 2 r for one that goes on with it.
constexpr int64_t kDecodeCounterBytes = (int64_t{kDecodeMaxRanges} + 64) * 4;
constexpr int64_t decode_slot_floats(int64_t rows, int64_t head_size) { return rows * (head_size + 4); }

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

// Decode reads the plan, block tables and seq_slots while the kernel before it in the stream may still run. They may be
// written by copies and by kernels that end before their successors begin, but not by one of this library's own, which
// let theirs begin early, directly before.
//
// What the host must know to launch. Captured launches stay valid for any plan with the same has_decode, has_prefill
// and num_workers and with a workspace as large: the kernels of version 1 and 2 are one, which does what the plan says.
struct AttentionLaunch {
  const int32_t* plan;      // device
  void* workspace;          // device, zeroed once before its first use; kernels leave it reusable
  int64_t workspace_bytes;  // capacity
  int32_t num_workers;      // as planned
  int32_t version;          // 1 or 2
  bool has_decode, has_prefill;
};

// Steps that a plan's buffers shall be large enough for.
struct AttentionPlanBounds {
  int64_t max_tokens, max_seqs, max_model_len;
  int32_t num_query_heads, num_kv_heads, head_size;
  int32_t num_workers, partition_keys;  // as in AttentionPlanParams
};

struct AttentionPlanResult {
  int64_t plan_ints;        // length of the plan
  int64_t workspace_bytes;  // needed by a launch
  int32_t version;          // 1 or 2
  bool has_decode, has_prefill;
};

}  // namespace pagemill

extern "C" {

// Writes the plan to `plan` where it fits into `capacity` (int32), and in any case its length to `result`. Returns 0,
// or non-zero with a message in pagemill_last_error() for a batch or option that is not supported. Part of the CPU
// library.
int pagemill_plan_attention(const pagemill::AttentionPlanParams* params, int32_t head_size, int32_t* plan,
                            int64_t capacity, pagemill::AttentionPlanResult* result);
// plan_ints and workspace_bytes that no plan within the bounds exceeds, whatever its version and window. Returns 0, or
// non-zero with a message.
int pagemill_attention_plan_capacity(const pagemill::AttentionPlanBounds* bounds,
                                     pagemill::AttentionPlanResult* result);
}
