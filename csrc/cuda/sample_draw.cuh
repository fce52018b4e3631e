// Drawing a token: from the sorted list of the first block where that holds all that survive, else from the slices.
#pragma once

#include "pagemill/philox.h"
#include "sample_select.cuh"

namespace pagemill::cuda::sampling {

// Of the list, the first place below `limit` for which matches(place) holds, or `limit`. All threads of the block.
template <typename Matches>
__device__ __forceinline__ int first_place(int limit, Matches matches) {
  BlockShared& shared = block_shared();
  __syncthreads();
  if (threadIdx.x == 0) shared.found = limit;
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEntriesPerThread; ++e) {
    const int place = threadIdx.x * kEntriesPerThread + e;
    if (place < limit && matches(place, e)) {
      atomicMin(&shared.found, place);
      break;
    }
  }
  __syncthreads();
  return shared.found;
}

// Running sums of weights over the first `count` places of the list; each thread keeps those of its own places.
struct RunningSums {
  double sums[kEntriesPerThread];
  double total;

  template <typename WeightAt>
  __device__ __forceinline__ RunningSums(int count, double start, WeightAt weight_at) {
    double sum = 0.0;
#pragma unroll
    for (int e = 0; e < kEntriesPerThread; ++e) {
      const int place = threadIdx.x * kEntriesPerThread + e;
      if (place < count) sum += static_cast<double>(weight_at(place));
      sums[e] = sum;
    }
    const auto scan = scan_threads(sum, &BlockShared::warp_masses);
#pragma unroll
    for (int e = 0; e < kEntriesPerThread; ++e) sums[e] += start + scan.before;
    total = start + scan.total;
  }
};

// Packs first, first + 1, .. end - 1 of a slice: what one warp walks over in find_by_mass.
struct Stretch {
  int32_t first, end;
};

template <bool kResident, typename Weight>
__device__ __forceinline__ void weigh_pack(const Slice<kResident>& slice, int32_t pack, Weight weight,
                                           double (&weights)[kSlicePack]) {
  const float4 x = slice.pack(pack);
  const int32_t id = slice.begin() + pack * kSlicePack;
  const float single[kSlicePack] = {weight(x.x, id), weight(x.y, id + 1), weight(x.z, id + 2), weight(x.w, id + 3)};
#pragma unroll
  for (int e = 0; e < kSlicePack; ++e) weights[e] = static_cast<double>(single[e]);
}

// The part in which the running sum passes the target, and what comes before it. Rounding can leave a remainder: the
// last part with any weight takes it. The same rule holds for blocks, warps and entries.
struct Owner {
  int index = 0;
  double before;
};
template <typename MassOf>
__device__ __forceinline__ Owner find_owner(int count, double before, double target, MassOf mass_of) {
  Owner owner{0, before};
  bool is_passed = false;
  for (int i = 0; i < count; ++i) {
    const double mass = mass_of(i);
    if (is_passed || !(mass > 0.0)) continue;
    owner = {i, before};
    before += mass;
    is_passed = before > target;
  }
  return owner;
}

// One warp: the id in its stretch at which the running sum, `before` at its start, passes the target.
template <bool kResident, typename Weight>
__device__ __forceinline__ int32_t find_in_stretch(const Slice<kResident>& slice, const Stretch& stretch, Weight weight,
                                                   double before, double target) {
  const int lane = threadIdx.x % kWarpLanes;
  int32_t hit = INT32_MAX, last_positive = -1;
  for (int32_t base = stretch.first; base < stretch.end; base += kWarpLanes) {
    const int32_t pack = base + lane;
    double weights[kSlicePack] = {};
    if (pack < stretch.end) weigh_pack(slice, pack, weight, weights);
    const double mine = (weights[0] + weights[1]) + (weights[2] + weights[3]);
    double inclusive = mine;
#pragma unroll
    for (int offset = 1; offset < kWarpLanes; offset *= 2) {
      const double other = __shfl_up_sync(0xffffffffu, inclusive, offset);
      if (lane >= offset) inclusive += other;
    }
    double sum = before + (inclusive - mine);
#pragma unroll
    for (int e = 0; e < kSlicePack; ++e) {
      sum += weights[e];
      if (!(weights[e] > 0.0)) continue;
      last_positive = slice.begin() + pack * kSlicePack + e;
      if (sum > target) hit = min(hit, last_positive);
    }
    if (__any_sync(0xffffffffu, hit != INT32_MAX)) break;
    before += __shfl_sync(0xffffffffu, inclusive, kWarpLanes - 1);
  }
  hit = combine_lanes(hit, [](int32_t a, int32_t b) { return min(a, b); });
  last_positive = combine_lanes(last_positive, [](int32_t a, int32_t b) { return max(a, b); });
  return hit != INT32_MAX ? hit : last_positive;
}

// Weights of the stretch, summed by the warp; known to all its lanes.
template <bool kResident, typename Weight>
__device__ __forceinline__ double mass_of_stretch(const Slice<kResident>& slice, const Stretch& stretch,
                                                  Weight weight) {
  double mass = 0.0;
#pragma unroll 2
  for (int32_t pack = stretch.first + static_cast<int>(threadIdx.x % kWarpLanes); pack < stretch.end;
       pack += kWarpLanes) {
    double weights[kSlicePack];
    weigh_pack(slice, pack, weight, weights);
    mass += (weights[0] + weights[1]) + (weights[2] + weights[3]);
  }
  return combine_lanes(mass, [](double a, double b) { return a + b; });
}

// The part of the stretch that is this warp's, where the block's warps share it.
__device__ __forceinline__ Stretch part_of(const Stretch& stretch, int warp) {
  const int32_t length = divide_up(stretch.end - stretch.first, kWarps);
  return {min(stretch.first + warp * length, stretch.end), min(stretch.first + (warp + 1) * length, stretch.end)};
}

// The warps' masses, by warp, for all threads of the block.
__device__ __forceinline__ const double* share_warp_masses(double mass) {
  BlockShared& shared = block_shared();
  __syncthreads();
  if (threadIdx.x % kWarpLanes == 0) shared.warp_masses[threadIdx.x / kWarpLanes] = mass;
  __syncthreads();
  return shared.warp_masses;
}

// The entry where the running sum of weights, in the order of ids, passes target_of(total): by all blocks, known to
// all. weight(entry, id) is not negative; at least one is positive.
template <bool kResident, typename Weight, typename TargetOf>
__device__ int32_t find_by_mass(Team& team, const Slice<kResident>& slice, Weight weight, TargetOf target_of) {
  const int warp = threadIdx.x / kWarpLanes;
  const Stretch whole{0, slice.num_packs()};
  const double* of_warps = share_warp_masses(mass_of_stretch(slice, part_of(whole, warp), weight));
  double block_mass = 0.0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) block_mass += of_warps[i];
  const Partial* of_blocks = team.collect(block_mass);
  const auto mass_of_block = [&](int rank) { return get<double>(of_blocks[rank]); };
  double total = 0.0;
  for (uint32_t rank = 0; rank < team.size(); ++rank) total += mass_of_block(rank);
  const double target = target_of(total);
  const Owner block = find_owner(static_cast<int>(team.size()), 0.0, target, mass_of_block);
  if (static_cast<int>(team.rank()) == block.index) {
    // The stretch of one warp, once more in parts, so that one warp has little left to look through.
    Owner owner = find_owner(kWarps, block.before, target, [&](int i) { return of_warps[i]; });
    const Stretch stretch = part_of(whole, owner.index);
    of_warps = share_warp_masses(mass_of_stretch(slice, part_of(stretch, warp), weight));
    owner = find_owner(kWarps, owner.before, target, [&](int i) { return of_warps[i]; });
    if (warp == owner.index) {
      team.publish(&BlockShared::found, find_in_stretch(slice, part_of(stretch, warp), weight, owner.before, target));
    }
  }
  team.barrier();
  return block_shared().found;
}

// The number-th (from 1) of the entries that equal `value`.
template <bool kResident>
__device__ __noinline__ int32_t nth_equal(Team& team, const Slice<kResident>& slice, float value, double number,
                                          int32_t vocab_size) {
  return find_by_mass(
      team, slice, [&](float x, int32_t id) { return x == value && id < vocab_size ? 1.0f : 0.0f; },
      [&](double) { return number - 0.5; });
}

// Where top-k cuts: the first block's list holds the cut. Entries equal to it survive unless `is_exact`.
__device__ inline Threshold cut_list_by_count(const Selection& selection, uint32_t count, bool is_exact) {
  sort_list(static_cast<int>(selection.count));
  const uint64_t cut = block_shared().candidates[count - selection.count_above - 1];
  return {candidate_value(cut), is_exact ? candidate_id(cut) : kLastIndex};
}

// Where top-p cuts.
__device__ __noinline__ Threshold cut_list_by_mass(const Selection& selection, const Softmax& softmax) {
  const int count = static_cast<int>(selection.count);
  sort_list(count);
  const RunningSums running(count, selection.mass_above,
                            [&](int place) { return softmax(candidate_value(block_shared().candidates[place])); });
  const int place = first_place(count - 1, [&](int, int e) { return running.sums[e] >= selection.wanted; });
  return {candidate_value(block_shared().candidates[place]), candidate_id(block_shared().candidates[place])};
}

// What remains to be cut from a complete list, in the first block.
struct ListCuts {
  int32_t top_k;  // 0: none
  double top_p;   // 1 or more: none
  double wanted;  // for top_p without top_k: the mass that must be reached
  float lowest;   // of min-p; -inf: none
  double uniform;
};

__device__ __noinline__ int32_t draw_from_list(int count, const ListCuts& cuts, const Softmax& softmax) {
  auto& list = block_shared().candidates;
  const auto value_at = [&](int place) { return candidate_value(list[place]); };
  sort_list(count);
  int kept = count;
  if (cuts.top_k > 0) {
    const float last = value_at(cuts.top_k - 1);
    kept = first_place(count, [&](int place, int) { return value_at(place) < last; });
  }
  if (cuts.top_p < 1.0) {
    const RunningSums running(kept, 0.0, [&](int place) { return softmax(value_at(place)); });
    const double wanted = cuts.top_k > 0 ? cuts.top_p * running.total : cuts.wanted;
    kept = 1 + first_place(kept - 1, [&](int, int e) { return running.sums[e] >= wanted; });
  }
  if (cuts.lowest > -kInfinity) {
    kept = first_place(kept, [&](int place, int) { return value_at(place) < cuts.lowest; });
  }
  // By id, with the weights where the values were.
  uint64_t by_id[kEntriesPerThread];
#pragma unroll
  for (int e = 0; e < kEntriesPerThread; ++e) {
    const int place = threadIdx.x * kEntriesPerThread + e;
    by_id[e] = UINT64_MAX;
    if (place < kept) {
      by_id[e] = (static_cast<uint64_t>(static_cast<uint32_t>(candidate_id(list[place]))) << 32) |
                 __float_as_uint(softmax(value_at(place)));
    }
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kEntriesPerThread; ++e) list[threadIdx.x * kEntriesPerThread + e] = by_id[e];
  sort_list(kept);
  const auto weight_at = [&](int place) { return __uint_as_float(static_cast<uint32_t>(list[place])); };
  const RunningSums running(kept, 0.0, weight_at);
  const double target = cuts.uniform * running.total;
  int place = first_place(kept, [&](int, int e) { return running.sums[e] > target; });
  if (place == kept) {
    do {
      --place;
    } while (place > 0 && !(weight_at(place) > 0.0f));
  }
  return static_cast<int32_t>(list[place] >> 32);
}

}  // namespace pagemill::cuda::sampling
