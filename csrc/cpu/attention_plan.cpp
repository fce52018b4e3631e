// Cuts one step's attention into work for a GPU. Runs on the host once a step, so it allocates nothing once it has seen
// its largest batch.
#include "pagemill/attention_plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "error.h"

namespace pagemill {
namespace {

// A thread block with fewer tiles than it has warps leaves warps idle and makes more partial results to join.
constexpr int64_t kMinWorkerTiles = 4;
// One pass is chosen where it lasts at most this much longer than a perfect balance: it has nothing to join.
constexpr double kOnePassSlack = 1.10;
// Equal pieces of each (entry, KV head) are preferred to an exact balance where they last at most this much longer.
constexpr double kEqualPiecesSlack = 1.06;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Plan {
  std::vector<DecodeEntry> entries;
  std::vector<int64_t> entry_starts;  // [num_entries + 1], in tiles, over all KV heads
  std::vector<PrefillTile> prefill;
  std::vector<DecodeWorker> workers;
  std::vector<int64_t> starts;  // [busy workers + 1], in tiles of the work in a row
  int64_t num_tiles = 0;        // of all entries, for one KV head
  int64_t num_pieces = 0;
  int32_t piece_tiles = 0;
  int32_t max_rows = 1;
  int32_t version = 1;
};
thread_local Plan reused_plan;

int check(const AttentionPlanParams& p, int32_t head_size) {
  if (p.num_seqs < 0) return fail("num_seqs %d is negative", p.num_seqs);
  if (p.num_query_heads <= 0 || p.num_kv_heads <= 0 || p.num_query_heads % p.num_kv_heads != 0) {
    return fail("num_query_heads %d is not a multiple of num_kv_heads %d", p.num_query_heads, p.num_kv_heads);
  }
  if (head_size <= 0 || head_size > 256 || head_size % 8 != 0) {
    return fail("head_size %d is not supported: 64, 80, 96, 112, 128, 192, 256 are", head_size);
  }
  if (p.window < -1 || p.window == 0) return fail("window is %d: it must be -1 (none) or at least 1", p.window);
  if (p.num_workers < 1 || p.num_workers > kDecodeMaxWorkers) {
    return fail("num_workers is %d: it must lie between 1 and %d", p.num_workers, kDecodeMaxWorkers);
  }
  if (p.version < AttentionVersion::kAuto || p.version > AttentionVersion::kV2) {
    return fail("version is %d: 0 (chosen), 1 and 2 are supported", static_cast<int>(p.version));
  }
  if (p.partition_keys < 0 || p.partition_keys % kDecodeTileKeys != 0) {
    return fail("partition_keys is %d: it must be 0 (balanced) or a multiple of %d", p.partition_keys, kDecodeTileKeys);
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

// Cuts each (entry, KV head) into pieces of piece_tiles.
void number_pieces(Plan& plan, int32_t num_kv_heads, int64_t piece_tiles) {
  plan.piece_tiles = static_cast<int32_t>(piece_tiles);
  int64_t pieces = 0;
  for (DecodeEntry& entry : plan.entries) {
    entry.first_piece = static_cast<int32_t>(pieces);
    pieces += ceil_div(entry.num_tiles, piece_tiles) * num_kv_heads;
  }
  plan.num_pieces = pieces;
}

// Position in the work: the index of the entry that holds it.
size_t entry_at(const Plan& plan, int64_t position) {
  return static_cast<size_t>(std::upper_bound(plan.entry_starts.begin(), plan.entry_starts.end() - 1, position) -
                             plan.entry_starts.begin() - 1);
}

int64_t pieces_of(const DecodeEntry& entry, int64_t piece_tiles) { return ceil_div(entry.num_tiles, piece_tiles); }

// Where piece `index` of all begins.
int64_t piece_start(const Plan& plan, int64_t index) {
  const auto after = std::upper_bound(plan.entries.begin(), plan.entries.end(), index,
                                      [](int64_t i, const DecodeEntry& entry) { return i < entry.first_piece; });
  const size_t e = static_cast<size_t>(after - plan.entries.begin() - 1);
  const DecodeEntry& entry = plan.entries[e];
  const int64_t pieces = pieces_of(entry, plan.piece_tiles), in_entry = index - entry.first_piece;
  return plan.entry_starts[e] + in_entry / pieces * entry.num_tiles + in_entry % pieces * plan.piece_tiles;
}

// The boundary between pieces that is nearest to a position.
int64_t nearest_boundary(const Plan& plan, int64_t position) {
  const size_t e = entry_at(plan, position);
  const DecodeEntry& entry = plan.entries[e];
  const int64_t in_entry = position - plan.entry_starts[e];
  const int64_t head_start = in_entry / entry.num_tiles * entry.num_tiles;
  const int64_t in_head = in_entry - head_start;
  const int64_t before = in_head / plan.piece_tiles * plan.piece_tiles;
  const int64_t after = std::min<int64_t>(entry.num_tiles, before + plan.piece_tiles);
  return plan.entry_starts[e] + head_start + (in_head - before <= after - in_head ? before : after);
}

void cut_at_pieces(Plan& plan, int64_t total, int64_t num_workers) {
  plan.starts.clear();
  if (plan.num_pieces <= num_workers) {
    for (int64_t i = 0; i < plan.num_pieces; ++i) plan.starts.push_back(piece_start(plan, i));
  } else {
    for (int64_t w = 0; w < num_workers; ++w) {
      const int64_t start = nearest_boundary(plan, total * w / num_workers);
      if (start < total && (plan.starts.empty() || start > plan.starts.back())) plan.starts.push_back(start);
    }
  }
  plan.starts.push_back(total);
}

void cut_evenly(Plan& plan, int64_t total, int64_t num_workers) {
  const int64_t busy = std::clamp<int64_t>(total / kMinWorkerTiles, 1, num_workers);
  plan.starts.clear();
  for (int64_t w = 0; w <= busy; ++w) plan.starts.push_back(total * w / busy);
}

int64_t longest_range(const Plan& plan) {
  int64_t longest = 0;
  for (size_t w = 0; w + 1 < plan.starts.size(); ++w) longest = std::max(longest, plan.starts[w + 1] - plan.starts[w]);
  return longest;
}

int64_t longest_entry(const Plan& plan) {
  int64_t longest = 1;
  for (const DecodeEntry& entry : plan.entries) longest = std::max<int64_t>(longest, entry.num_tiles);
  return longest;
}

// Chooses where each worker's range begins; sets version and piece_tiles.
int cut_decode(const AttentionPlanParams& p, Plan& plan) {
  const int64_t total = plan.entry_starts.back(), num_workers = p.num_workers;
  plan.piece_tiles = 0;
  plan.num_pieces = 0;
  plan.version = p.version == AttentionVersion::kV2 ? 2 : 1;
  plan.starts.assign(1, 0);
  if (total == 0) return 0;
  if (p.partition_keys != 0) {
    plan.version = 2;
    number_pieces(plan, p.num_kv_heads, p.partition_keys / kDecodeTileKeys);
    if (plan.num_pieces > std::numeric_limits<int32_t>::max()) {
      return fail("partition_keys %d makes too many partitions", p.partition_keys);
    }
    cut_at_pieces(plan, total, num_workers);
    return 0;
  }
  const double ideal = static_cast<double>(std::max(ceil_div(total, num_workers), kMinWorkerTiles));
  const int64_t longest = longest_entry(plan);
  if (p.version != AttentionVersion::kV2) {
    number_pieces(plan, p.num_kv_heads, longest);
    cut_at_pieces(plan, total, num_workers);
    plan.piece_tiles = 0;
    if (p.version == AttentionVersion::kV1) return 0;
    if (static_cast<double>(longest_range(plan)) <= ideal * kOnePassSlack) return 0;
  }
  plan.version = 2;
  const int64_t num_pairs = static_cast<int64_t>(plan.entries.size()) * p.num_kv_heads;
  if (num_pairs <= num_workers) {
    const int64_t pieces_each = std::min(num_workers / num_pairs, ceil_div(longest, kMinWorkerTiles));
    const int64_t piece = ceil_div(longest, pieces_each);
    if (static_cast<double>(piece) <= ideal * kEqualPiecesSlack) {
      number_pieces(plan, p.num_kv_heads, piece);
      cut_at_pieces(plan, total, num_workers);
      plan.piece_tiles = 0;
      plan.num_pieces = 0;
      return 0;
    }
  }
  plan.num_pieces = 0;
  cut_evenly(plan, total, num_workers);
  return 0;
}

// Which workers have a part of the (entry, KV head) that begins at `begin`.
struct Sharers {
  int32_t first, count;
};

Sharers sharers_of(const Plan& plan, int64_t begin, int64_t num_tiles) {
  const auto first = std::upper_bound(plan.starts.begin(), plan.starts.end() - 1, begin) - 1;
  const auto last = std::lower_bound(plan.starts.begin(), plan.starts.end() - 1, begin + num_tiles) - 1;
  return {static_cast<int32_t>(first - plan.starts.begin()), static_cast<int32_t>(last - first + 1)};
}

void make_workers(const AttentionPlanParams& p, Plan& plan) {
  plan.workers.assign(static_cast<size_t>(p.num_workers), DecodeWorker{});
  for (size_t w = 0; w + 1 < plan.starts.size(); ++w) {
    const int64_t start = plan.starts[w], end = plan.starts[w + 1];
    const size_t e = entry_at(plan, start), last_e = entry_at(plan, end - 1);
    const DecodeEntry &entry = plan.entries[e], &last_entry = plan.entries[last_e];
    const int64_t in_entry = start - plan.entry_starts[e], in_last = end - 1 - plan.entry_starts[last_e];
    const int64_t first_pair = start - in_entry % entry.num_tiles;
    const int64_t last_pair = end - 1 - in_last % last_entry.num_tiles;
    const Sharers first = sharers_of(plan, first_pair, entry.num_tiles);
    const Sharers last = sharers_of(plan, last_pair, last_entry.num_tiles);
    plan.workers[w] = {entry,
                       static_cast<int32_t>(e),
                       static_cast<int32_t>(in_entry / entry.num_tiles),
                       static_cast<int32_t>(in_entry % entry.num_tiles),
                       static_cast<int32_t>(end - start),
                       first.first,
                       first.count,
                       last.count,
                       0};
  }
}

// The same for every plan without a fixed partition, so that a workspace need not grow from step to step.
int64_t workspace_bytes(const AttentionPlanParams& p, const Plan& plan, int32_t head_size) {
  const int64_t balanced = int64_t{2} * p.num_workers * decode_slot_floats(kDecodeTileRows, head_size);
  const int64_t pieces = plan.piece_tiles != 0 ? plan.num_pieces * decode_slot_floats(plan.max_rows, head_size) : 0;
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
  const int64_t workers_offset = kHeaderInts, entries_offset = workers_offset + ints_of(plan.workers);
  const int64_t prefill_offset = entries_offset + ints_of(plan.entries);
  result->plan_ints = prefill_offset + ints_of(plan.prefill);
  if (result->plan_ints > std::numeric_limits<int32_t>::max()) return fail("the batch is too large to plan");
  if (result->plan_ints > capacity) return 0;
  PlanHeader header{};
  header.num_entries = static_cast<int32_t>(plan.entries.size());
  header.entries_offset = static_cast<int32_t>(entries_offset);
  header.num_workers = static_cast<int32_t>(plan.workers.size());
  header.workers_offset = static_cast<int32_t>(workers_offset);
  header.num_tiles = static_cast<int32_t>(std::min<int64_t>(plan.num_tiles, std::numeric_limits<int32_t>::max()));
  header.piece_tiles = plan.piece_tiles;
  header.max_rows = plan.max_rows;
  header.version = plan.version;
  header.num_prefill_tiles = static_cast<int32_t>(plan.prefill.size());
  header.prefill_offset = static_cast<int32_t>(prefill_offset);
  std::memcpy(out, &header, sizeof(header));
  write_section(out, workers_offset, plan.workers);
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
  make_workers(*params, work);
  result->version = work.version;
  result->has_decode = !work.entries.empty();
  result->has_prefill = !work.prefill.empty();
  result->workspace_bytes = workspace_bytes(*params, work, head_size);
  return write(work, plan, capacity, result);
}
