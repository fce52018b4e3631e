// The plan of one step's attention on a GPU: checks, the list of work, and the array that goes to the device. Runs on
// the host once a step, so it allocates nothing once it has seen its largest batch.
#include "attention_plan_cut.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "error.h"

namespace pagemill {
namespace {

thread_local Plan reused_plan;

// Params: AttentionPlanParams or AttentionPlanBounds.
template <typename Params>
int check_geometry(const Params& p, int32_t head_size) {
  if (p.num_query_heads <= 0 || p.num_kv_heads <= 0 || p.num_query_heads % p.num_kv_heads != 0) {
    return fail("num_query_heads %d is not a multiple of num_kv_heads %d", p.num_query_heads, p.num_kv_heads);
  }
  if (head_size <= 0 || head_size > 256 || head_size % 8 != 0) {
    return fail("head_size %d is not supported: 64, 80, 96, 112, 128, 192, 256 are", head_size);
  }
  if (p.num_workers < 1 || p.num_workers > kDecodeMaxWorkers) {
    return fail("num_workers is %d: it must lie between 1 and %d", p.num_workers, kDecodeMaxWorkers);
  }
  if (p.partition_keys < 0 || p.partition_keys % kDecodeTileKeys != 0) {
    return fail("partition_keys is %d: it must be 0 (balanced) or a multiple of %d", p.partition_keys, kDecodeTileKeys);
  }
  return 0;
}

int check(const AttentionPlanParams& p, int32_t head_size) {
  if (p.num_seqs < 0) return fail("num_seqs %d is negative", p.num_seqs);
  if (const int error = check_geometry(p, head_size)) return error;
  if (p.window < -1 || p.window == 0) return fail("window is %d: it must be -1 (none) or at least 1", p.window);
  if (p.version < AttentionVersion::kAuto || p.version > AttentionVersion::kV2) {
    return fail("version is %d: 0 (chosen), 1 and 2 are supported", static_cast<int>(p.version));
  }
  if (p.partition_keys != 0 && p.version == AttentionVersion::kV1) {
    return fail("partition_keys is %d, but version 1 has no partitions", p.partition_keys);
  }
  for (int32_t b = 0; b < p.num_seqs; ++b) {
    const int64_t num_new = int64_t{p.query_start[b + 1]} - p.query_start[b];
    if (p.query_start[b] < 0 || num_new < 0) {
      return fail("query_start[%d..%d] is %d, %d: not ascending from 0", b, b + 1, p.query_start[b],
                  p.query_start[b + 1]);
    }
    if (num_new > 0 && p.context_lens[b] < num_new) {
      return fail("context_lens[%d] is %d: less than the sequence's %lld new tokens", b, p.context_lens[b],
                  static_cast<long long>(num_new));
    }
    if (p.context_lens[b] > std::numeric_limits<int32_t>::max() - kDecodeTileKeys) {
      return fail("context_lens[%d] is %d: too large", b, p.context_lens[b]);
    }
  }
  return 0;
}

void add_prefill_tiles(const AttentionPlanParams& p, int32_t seq, int32_t num_new, std::vector<PrefillTile>& tiles) {
  const int32_t first_position = p.context_lens[seq] - num_new;
  for (int32_t first = 0; first < num_new; first += kPrefillTileQueries) {
    const int32_t count = std::min(kPrefillTileQueries, num_new - first);
    tiles.push_back({seq, first, count, first_position + first + count});
  }
}

void add_decode_entries(const AttentionPlanParams& p, int32_t seq, int32_t num_new, Plan& plan) {
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  const int32_t first_position = p.context_lens[seq] - num_new;
  for (int32_t first_row = 0; first_row < num_new * group; first_row += kDecodeTileRows) {
    const int32_t rows = std::min(kDecodeTileRows, num_new * group - first_row);
    const int32_t end_key = first_position + (first_row + rows - 1) / group + 1;
    const int32_t first_seen = first_position + first_row / group - p.window + 1;
    const int32_t begin_key = p.window >= 0 ? std::max(0, first_seen) : 0;
    const int32_t first_tile = begin_key / kDecodeTileKeys;
    const int32_t num_tiles = (end_key - 1) / kDecodeTileKeys + 1 - first_tile;
    plan.entries.push_back({seq, p.query_start[seq], first_position, first_row, rows, first_tile, num_tiles, 0,
                            begin_key, end_key, first_position + first_row / group + 1, 0});
    plan.num_tiles += num_tiles;
    plan.entry_starts.push_back(plan.num_tiles * p.num_kv_heads);
    plan.max_rows = std::max(plan.max_rows, rows);
  }
}

void sort_prefill_tiles(const AttentionPlanParams& p, std::vector<PrefillTile>& tiles) {
  const auto cost = [&](const PrefillTile& tile) {
    return p.window >= 0 ? std::min(tile.end_key, tile.num_queries + p.window) : tile.end_key;
  };
  std::sort(tiles.begin(), tiles.end(), [&](const PrefillTile& a, const PrefillTile& b) {
    const int32_t cost_a = cost(a), cost_b = cost(b);
    if (cost_a != cost_b) return cost_a > cost_b;
    return a.seq != b.seq ? a.seq < b.seq : a.first_query < b.first_query;
  });
}

void gather_work(const AttentionPlanParams& p, Plan& plan) {
  plan.entries.clear();
  plan.prefill.clear();
  plan.entry_starts.assign(1, 0);
  plan.num_tiles = 0;
  plan.max_rows = 1;
  const int32_t group = p.num_query_heads / p.num_kv_heads;
  for (int32_t b = 0; b < p.num_seqs; ++b) {
    const int32_t num_new = p.query_start[b + 1] - p.query_start[b];
    if (num_new == 0) continue;
    if (int64_t{num_new} * group <= kDecodeMaxRows) {
      add_decode_entries(p, b, num_new, plan);
    } else {
      add_prefill_tiles(p, b, num_new, plan.prefill);
    }
  }
  sort_prefill_tiles(p, plan.prefill);
}

// The same for every plan without a fixed partition (no pieces), so that a workspace need not grow from step to step.
int64_t workspace_bytes(int32_t num_workers, int64_t num_pieces, int32_t max_rows, int32_t head_size) {
  const int64_t balanced = 2 * kMaxRangesPerWorker * num_workers * decode_slot_floats(kDecodeTileRows, head_size);
  const int64_t pieces = num_pieces * decode_slot_floats(max_rows, head_size);
  return kDecodeCounterBytes + std::max(balanced, pieces) * static_cast<int64_t>(sizeof(float));
}

template <typename T>
int64_t ints_of(const std::vector<T>& section) {
  return static_cast<int64_t>(section.size() * sizeof(T) / sizeof(int32_t));
}

template <typename T>
void write_section(int32_t* plan, int64_t offset, const std::vector<T>& section) {
  if (!section.empty()) std::memcpy(plan + offset, section.data(), section.size() * sizeof(T));
}

int write(const Plan& plan, int32_t* out, int64_t capacity, AttentionPlanResult* result) {
  constexpr int64_t kHeaderInts = sizeof(PlanHeader) / sizeof(int32_t);
  const int64_t ranges_offset = kHeaderInts, entries_offset = ranges_offset + ints_of(plan.ranges);
  const int64_t prefill_offset = entries_offset + ints_of(plan.entries);
  result->plan_ints = prefill_offset + ints_of(plan.prefill);
  if (result->plan_ints > std::numeric_limits<int32_t>::max()) return fail("the batch is too large to plan");
  if (result->plan_ints > capacity) return 0;
  PlanHeader header{};
  header.num_entries = static_cast<int32_t>(plan.entries.size());
  header.entries_offset = static_cast<int32_t>(entries_offset);
  header.num_ranges = static_cast<int32_t>(plan.ranges.size());
  header.ranges_offset = static_cast<int32_t>(ranges_offset);
  header.num_tiles = static_cast<int32_t>(std::min<int64_t>(plan.num_tiles, std::numeric_limits<int32_t>::max()));
  header.piece_tiles = plan.piece_tiles;
  header.max_rows = plan.max_rows;
  header.version = plan.version;
  header.num_prefill_tiles = static_cast<int32_t>(plan.prefill.size());
  header.prefill_offset = static_cast<int32_t>(prefill_offset);
  std::memcpy(out, &header, sizeof(header));
  write_section(out, ranges_offset, plan.ranges);
  write_section(out, entries_offset, plan.entries);
  write_section(out, prefill_offset, plan.prefill);
  return 0;
}

}  // namespace
}  // namespace pagemill

extern "C" int pagemill_plan_attention(const pagemill::AttentionPlanParams* params, int32_t head_size, int32_t* plan,
                                       int64_t capacity, pagemill::AttentionPlanResult* result) {
  using namespace pagemill;
  if (const int error = check(*params, head_size)) return error;
  Plan& work = reused_plan;
  gather_work(*params, work);
  if (const int error = cut_decode(*params, work)) return error;
  result->version = work.version;
  result->has_decode = !work.entries.empty();
  result->has_prefill = !work.prefill.empty();
  const int64_t num_pieces = work.piece_tiles != 0 ? work.num_pieces : 0;
  result->workspace_bytes = workspace_bytes(params->num_workers, num_pieces, work.max_rows, head_size);
  return write(work, plan, capacity, result);
}

extern "C" int pagemill_attention_plan_capacity(const pagemill::AttentionPlanBounds* bounds,
                                                pagemill::AttentionPlanResult* result) {
  using namespace pagemill;
  const AttentionPlanBounds& b = *bounds;
  if (b.max_tokens < 0 || b.max_seqs < 0 || b.max_model_len < 0) {
    return fail("max_tokens %lld, max_seqs %lld, max_model_len %lld: none may be negative",
                static_cast<long long>(b.max_tokens), static_cast<long long>(b.max_seqs),
                static_cast<long long>(b.max_model_len));
  }
  if (const int error = check_geometry(b, b.head_size)) return error;
  // Rows with new tokens.
  const int64_t seqs = std::min(b.max_seqs, b.max_tokens);
  // A sequence's rows fill its entries but for the last, and its queries its tiles but for the last.
  const int64_t group = b.num_query_heads / b.num_kv_heads;
  const int64_t entries =
      std::min(seqs * (kDecodeMaxRows / kDecodeTileRows), seqs + b.max_tokens * group / kDecodeTileRows);
  const int64_t prefill_tiles = seqs + b.max_tokens / kPrefillTileQueries;
  const int64_t ranges =
      std::max<int64_t>(b.num_workers, std::min<int64_t>(b.num_workers * kMaxRangesPerWorker, kDecodeMaxRanges));
  const int64_t pieces_of_entry =
      b.partition_keys == 0 ? 0 : (b.max_model_len + b.partition_keys - 1) / b.partition_keys + 1;
  result->plan_ints = static_cast<int64_t>(sizeof(PlanHeader) + ranges * sizeof(DecodeRange) +
                                           entries * sizeof(DecodeEntry) + prefill_tiles * sizeof(PrefillTile)) /
                      static_cast<int64_t>(sizeof(int32_t));
  result->workspace_bytes =
      workspace_bytes(b.num_workers, entries * b.num_kv_heads * pieces_of_entry, kDecodeTileRows, b.head_size);
  result->version = 2;
  result->has_decode = result->has_prefill = seqs > 0;
  return 0;
}
