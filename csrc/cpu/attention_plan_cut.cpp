#include "attention_plan_cut.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "error.h"

namespace pagemill {
namespace {

// Numbers below were measured on an H200; docs/kernels.md has the runs.
//
// A thread block with fewer tiles than it has warps leaves warps idle and makes more partial results to join.
constexpr int64_t kMinRangeTiles = 4;
// Joining one more partial result takes as long as a part of a warp's tile does, so that the square root of this times
// the tiles of a pair is the number of parts that takes least time where memory bandwidth is no limit.
constexpr double kTilesPerSquaredPart = 2.5;
// With fewer tiles than this to each worker all work is given out at once. With more, workers that turn out to be fast
// take more of it: they read at rates that differ by 12 % either way.
constexpr double kMinDynamicTiles = 40.0;
// Few long pairs: with up to this many tiles to each worker, further pieces cost more to join than they gain.
constexpr double kMaxEqualTiles = 512.0;
constexpr double kUniformSlack = 1.1;     // longest pair over the mean one
constexpr double kEqualSlack = 1.06;      // time of equal units over that of a perfect balance
constexpr double kRaggedSlack = 1.5;      // the same of unequal pairs with few tiles: cuts at any place cost as much
constexpr double kShortPairShare = 0.15;  // of a worker's work: pairs as short as this balance by themselves
// Pairs of up to this many tiles stay whole: cuts cost more than what is out of balance. What limits a worker alone is
// several times faster than its share of the device's bandwidth.
constexpr int64_t kMaxWholeTiles = 192;
constexpr double kMaxWholeShare = 3.0;  // of a pair in a worker's work
constexpr int64_t kShortTiles = 64;
constexpr double kFewLeft = 1.4;  // with fewer pairs to each worker than this, and more than one, few work at the end

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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
  const int64_t busy = std::clamp<int64_t>(total / kMinRangeTiles, 1, num_workers);
  plan.starts.clear();
  for (int64_t w = 0; w <= busy; ++w) plan.starts.push_back(total * w / busy);
}

// How work is given out while it is done: to each worker a share at once, then ever smaller ranges.
struct Shares {
  double first;       // of a worker's work
  double later;       // of what is left, for each worker
  double smallest;    // of a worker's work
  int64_t min_tiles;  // of a later range
  double snap;        // of a range, by which its end moves to that of a pair; above 1: always
};
constexpr Shares kWholePairs{0.5, 0.3, 0.02, 8, 2.0};
constexpr Shares kShortPairs{0.7, 0.4, 0.02, 8, 2.0};
constexpr Shares kManyPairs{0.9, 0.5, 0.02, 8, 2.0};
constexpr Shares kAnyPosition{0.75, 1.0, 0.12, 32, 0.15};

void cut_dynamically(Plan& plan, int64_t total, int64_t num_workers, const Shares& shares) {
  const double workers = static_cast<double>(num_workers), ideal = static_cast<double>(total) / workers;
  const int64_t first = static_cast<int64_t>(shares.first * ideal);
  const int64_t max_ranges = std::min<int64_t>(num_workers * kMaxRangesPerWorker, kDecodeMaxRanges);
  const int64_t smallest = std::max({shares.min_tiles, static_cast<int64_t>(shares.smallest * ideal),
                                     ceil_div(total - first * num_workers, max_ranges - num_workers)});
  plan.starts.assign(1, 0);
  int64_t end = 0;  // before it moves
  for (int64_t i = 0; i + 1 < max_ranges; ++i) {
    const double left = static_cast<double>(total - end) / workers;
    const int64_t length = i < num_workers ? first : std::max(smallest, static_cast<int64_t>(shares.later * left));
    end += length;
    if (end + smallest / 2 >= total) break;
    const int64_t boundary = nearest_boundary(plan, end), moved = std::abs(boundary - end);
    const bool is_moved = shares.snap > 1.0 || static_cast<double>(moved) <= shares.snap * static_cast<double>(length);
    const int64_t start = is_moved ? boundary : end;
    if (start > plan.starts.back() && start < total) plan.starts.push_back(start);
  }
  plan.starts.push_back(total);
}

int64_t longest_entry(const Plan& plan) {
  int64_t longest = 1;
  for (const DecodeEntry& entry : plan.entries) longest = std::max<int64_t>(longest, entry.num_tiles);
  return longest;
}

// What the choice of a cut depends on. A pair is an (entry, KV head).
struct WorkShape {
  int64_t num_workers, num_pairs;
  int64_t total;    // tiles
  int64_t longest;  // tiles of a pair

  double ideal() const { return static_cast<double>(total) / static_cast<double>(num_workers); }
  // Time of equal units, each done by one worker, over that of a perfect balance.
  double waste(int64_t num_units) const {
    return static_cast<double>(ceil_div(num_units, num_workers) * num_workers) / static_cast<double>(num_units);
  }
  bool is_uniform() const {
    return static_cast<double>(longest * num_pairs) <= kUniformSlack * static_cast<double>(total);
  }
  bool suits_whole_pairs() const {
    const double share = static_cast<double>(longest) / ideal();
    const double pairs_each = static_cast<double>(num_pairs) / static_cast<double>(num_workers);
    if (share <= kShortPairShare) return true;
    if (is_uniform() && pairs_each >= 1.0 && waste(num_pairs) <= kEqualSlack) return true;
    if (pairs_each <= 0.5 || longest > kMaxWholeTiles || share > kMaxWholeShare) return false;
    return longest <= kShortTiles || pairs_each <= 1.0 || pairs_each >= kFewLeft;
  }
  // A claim costs some 3 us, which is much beside a short pair.
  const Shares& shares_of_pairs() const {
    constexpr int64_t kTinyTiles = 16;
    constexpr double kManyShare = 0.08;
    if (!is_uniform() && ideal() < kMinDynamicTiles) return kWholePairs;
    if (longest <= kTinyTiles || static_cast<double>(longest) <= kManyShare * ideal()) return kManyPairs;
    return longest <= kShortTiles ? kShortPairs : kWholePairs;
  }
};

// Equal pieces of each pair, one to a worker; false where they would leave too many workers without. Where time is that
// of one tile after another rather than of reading memory, the joining of pieces sets their number.
bool cut_equally(const AttentionPlanParams& p, const WorkShape& work, bool is_short, Plan& plan) {
  if (work.num_pairs > work.num_workers) return false;
  const double longest = static_cast<double>(work.longest);
  const int64_t best_parts = std::max<int64_t>(1, std::llround(std::sqrt(kTilesPerSquaredPart * longest)));
  const int64_t parts =
      std::min({work.num_workers / work.num_pairs, ceil_div(work.longest, kMinRangeTiles), best_parts});
  const int64_t piece = ceil_div(work.longest, parts);
  const bool is_limited_by_joining = is_short && parts == best_parts;
  const double ideal = std::max(std::ceil(work.ideal()), static_cast<double>(kMinRangeTiles));
  const double slack = work.is_uniform() ? kEqualSlack : kRaggedSlack;
  if (!is_limited_by_joining && static_cast<double>(piece) > ideal * slack) return false;
  number_pieces(plan, p.num_kv_heads, piece);
  cut_at_pieces(plan, work.total, work.num_workers);
  return true;
}

void cut_for_v1(const WorkShape& work, Plan& plan) {
  if (work.num_pairs <= work.num_workers) {
    cut_at_pieces(plan, work.total, work.num_workers);
  } else {
    cut_dynamically(plan, work.total, work.num_workers, work.shares_of_pairs());
  }
}

// Pieces are whole pairs when this is called.
void cut_by_shape(const AttentionPlanParams& p, const WorkShape& work, Plan& plan) {
  const bool is_short = work.ideal() < kMinDynamicTiles;
  if (p.version == AttentionVersion::kV1 || work.suits_whole_pairs()) {
    plan.version = p.version == AttentionVersion::kV2 ? 2 : 1;
    return cut_for_v1(work, plan);
  }
  plan.version = 2;
  const bool is_long = work.ideal() > kMaxEqualTiles;
  if (!is_long && (is_short || work.is_uniform()) && cut_equally(p, work, is_short, plan)) return;
  if (is_short) {
    cut_evenly(plan, work.total, work.num_workers);
  } else {
    cut_dynamically(plan, work.total, work.num_workers, kAnyPosition);
  }
}

// Moves from position to later position through the work in a row.
struct Cursor {
  const Plan& plan;
  size_t entry = 0;
  int64_t kv_head = 0, tile = 0;

  explicit Cursor(const Plan& of_plan) : plan(of_plan) {}

  void move_to(int64_t position) {
    while (position >= plan.entry_starts[entry + 1]) ++entry;
    const int64_t in_entry = position - plan.entry_starts[entry], num_tiles = plan.entries[entry].num_tiles;
    kv_head = in_entry / num_tiles;
    tile = in_entry - kv_head * num_tiles;
  }
};

void make_ranges(const AttentionPlanParams& p, Plan& plan) {
  const size_t count = plan.starts.size() - 1;
  plan.ranges.assign(std::max(static_cast<size_t>(p.num_workers), count), DecodeRange{});
  Cursor cursor(plan);
  for (size_t r = 0; r < count; ++r) {
    cursor.move_to(plan.starts[r]);
    const int32_t owner = cursor.tile == 0                                    ? static_cast<int32_t>(r)
                          : plan.starts[r - 1] > plan.starts[r] - cursor.tile ? plan.ranges[r - 1].first_owner
                                                                              : static_cast<int32_t>(r - 1);
    plan.ranges[r] = {plan.entries[cursor.entry],
                      static_cast<int32_t>(cursor.entry),
                      static_cast<int32_t>(cursor.kv_head),
                      static_cast<int32_t>(cursor.tile),
                      static_cast<int32_t>(plan.starts[r + 1] - plan.starts[r]),
                      owner,
                      1,
                      1,
                      0};
  }
  // How many follow is known from behind. A range of one (entry, KV head) shares it with all that share its end.
  for (size_t r = count; r-- > 0;) {
    DecodeRange& range = plan.ranges[r];
    const bool ends_pair = r + 1 == count || plan.ranges[r + 1].tile == 0;
    const bool is_one_pair = range.num_tiles <= range.entry.num_tiles - range.tile;
    const int32_t first = static_cast<int32_t>(r) - range.first_owner + 1;
    if (is_one_pair) {
      range.first_sharers = ends_pair ? first : plan.ranges[r + 1].first_sharers;
      range.last_sharers = range.first_sharers;
    } else {
      range.first_sharers = first;
      range.last_sharers = ends_pair ? 1 : plan.ranges[r + 1].first_sharers;
    }
  }
}

}  // namespace

int cut_decode(const AttentionPlanParams& p, Plan& plan) {
  const int64_t total = plan.entry_starts.back();
  plan.piece_tiles = 0;
  plan.num_pieces = 0;
  plan.version = p.version == AttentionVersion::kV2 ? 2 : 1;
  plan.starts.assign(1, 0);
  if (total > 0 && p.partition_keys != 0) {
    plan.version = 2;
    number_pieces(plan, p.num_kv_heads, p.partition_keys / kDecodeTileKeys);
    if (plan.num_pieces > std::numeric_limits<int32_t>::max()) {
      return fail("partition_keys %d makes too many partitions", p.partition_keys);
    }
    cut_at_pieces(plan, total, p.num_workers);
  } else if (total > 0) {
    const WorkShape work{p.num_workers, static_cast<int64_t>(plan.entries.size()) * p.num_kv_heads, total,
                         longest_entry(plan)};
    number_pieces(plan, p.num_kv_heads, work.longest);
    cut_by_shape(p, work, plan);
    plan.piece_tiles = 0;
  }
  make_ranges(p, plan);
  return 0;
}

}  // namespace pagemill
