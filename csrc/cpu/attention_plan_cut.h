// How the decode work of a plan is cut into ranges.
#pragma once

#include <cstdint>
#include <vector>

#include "pagemill/attention_plan.h"

namespace pagemill {

constexpr int64_t kMaxRangesPerWorker = 6;

struct Plan {
  std::vector<DecodeEntry> entries;
  std::vector<int64_t> entry_starts;  // [num_entries + 1], in tiles, over all KV heads
  std::vector<PrefillTile> prefill;
  std::vector<DecodeRange> ranges;
  std::vector<int64_t> starts;  // [ranges with work + 1], in tiles of the work in a row
  int64_t num_tiles = 0;        // of all entries, for one KV head
  int64_t num_pieces = 0;
  int32_t piece_tiles = 0;
  int32_t max_rows = 1;
  int32_t version = 1;
};

// Makes the ranges from the entries; sets version and piece_tiles. Returns 0, or what fail() gave.
int cut_decode(const AttentionPlanParams& p, Plan& plan);

}  // namespace pagemill
