// What the blocks that share a row of logits keep in shared memory, and how they combine what each has found.
//
// A row is cut over the blocks of a cluster: block r has entries r * slice_length and up, float32, the end
// filled up with -inf to whole packs.
#pragma once

#include "cluster.cuh"
#include "rows_common.cuh"

namespace pagemill::cuda::sampling {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 3;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr int kSlicePack = 4;
// Distances from the largest logit are counted in this many steps; the last stands for all that are further away.
constexpr int kBuckets = 2048;
// Entries that are looked at one by one, sorted, in shared memory.
constexpr int kMaxCandidates = 1024;
static_assert(kMaxCandidates % kThreads == 0 && kBuckets % kThreads == 0);

constexpr float kInfinity = __builtin_inff();
constexpr int32_t kLastIndex = INT32_MAX;

// Which entries survive: those above (value, index) in the order "larger value first, then smaller index".
struct Threshold {
  float value = -kInfinity;
  int32_t last_index = kLastIndex;

  __device__ __forceinline__ bool keeps(float x, int32_t index) const {
    return x > value || (x == value && index <= last_index);
  }
  __device__ __forceinline__ void raise(const Threshold& other) {
    if (other.value > value || (other.value == value && other.last_index < last_index)) *this = other;
  }
};

// Buckets that are looked at closely next, chosen by the first block for all.
struct Window {
  int32_t first, last;
  float low_value;        // the least of its entries is not less than this,
  float above_value;      // and entries of larger buckets are not less than this
  uint32_t count;         // entries in it; kUnknownCount with the last bucket
  uint32_t count_above;   // entries of larger buckets
  double estimate_above;  // estimated mass of larger buckets
  double estimate_end;    // and of these and the window
};
constexpr uint32_t kUnknownCount = UINT32_MAX;

constexpr int kMaxTeam = 16;

// What is combined over threads and blocks, as words.
struct alignas(16) Partial {
  uint32_t words[8];
};

// A bucket, with what is estimated or known to lie before it and up to its end.
struct Edge {
  int32_t bucket;
  uint32_t count_before;
  double mass_before, mass_end;
};

struct BlockShared {
  union {
    uint32_t counts[kBuckets];
    uint64_t candidates[kMaxCandidates];
  };
  Partial warp_partials[kWarps];
  Partial exchange[2][kMaxTeam];  // by the rank of the block that wrote it
  double warp_masses[kWarps];
  uint32_t warp_counts[kWarps];
  Window window;
  Threshold threshold;
  uint32_t num_candidates;
  Edge edges[2];
  uint32_t total_count;
  int32_t found;
};

static_assert(sizeof(BlockShared) % 16 == 0);

// This block's: the first part of its dynamic shared memory. A slice of the row may follow.
__device__ __forceinline__ BlockShared& block_shared() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return *reinterpret_cast<BlockShared*>(dynamic_shared);
}
__device__ __forceinline__ float* shared_slice() {
  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  return reinterpret_cast<float*>(dynamic_shared + sizeof(BlockShared));
}

template <typename Value>
__device__ __forceinline__ void put(Partial& partial, const Value& value) {
  static_assert(sizeof(Value) % 4 == 0 && sizeof(Value) <= sizeof(Partial));
  uint32_t words[sizeof(Value) / 4];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Value) / 4); ++i) partial.words[i] = words[i];
}
template <typename Value>
__device__ __forceinline__ Value get(const Partial& partial) {
  uint32_t words[sizeof(Value) / 4];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Value) / 4); ++i) words[i] = partial.words[i];
  Value value;
  memcpy(&value, words, sizeof(Value));
  return value;
}

template <typename Value, typename Combine>
__device__ __forceinline__ Value combine_lanes(Value value, Combine combine) {
  static_assert(sizeof(Value) % 4 == 0 && sizeof(Value) <= sizeof(Partial));
  constexpr int kWords = sizeof(Value) / 4;
#pragma unroll
  for (int offset = kWarpLanes / 2; offset > 0; offset /= 2) {
    uint32_t words[kWords];
    memcpy(words, &value, sizeof(Value));
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], offset);
    Value other;
    memcpy(&other, words, sizeof(Value));
    value = combine(value, other);
  }
  return value;
}

// The blocks of one row.
class Team {
 public:
  __device__ __forceinline__ Team() : rank_(cluster::rank()), size_(cluster::size()) {}

  __device__ __forceinline__ uint32_t rank() const { return rank_; }
  __device__ __forceinline__ uint32_t size() const { return size_; }
  __device__ __forceinline__ bool is_first() const { return rank_ == 0; }
  __device__ __forceinline__ void barrier() const { cluster::barrier(); }
  // One warp writes the value to that member of every block's shared memory; others may read their own after a barrier.
  template <typename Value>
  __device__ __forceinline__ void publish(Value BlockShared::* member, const Value& value) const {
    const uint32_t lane = threadIdx.x % kWarpLanes;
    if (lane < size_) shared_of(lane).*member = value;
  }
  __device__ __forceinline__ BlockShared& shared_of(uint32_t rank) const {
    return *cluster::shared_of(&block_shared(), rank);
  }

  // Every thread of every block gets the same result. The order of combining is fixed.
  template <typename Value, typename Combine>
  __device__ __forceinline__ Value all_reduce(Value value, Value identity, Combine combine) {
    BlockShared& shared = block_shared();
    const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
    value = combine_lanes(value, combine);
    if (lane == 0) put(shared.warp_partials[warp], value);
    __syncthreads();
    if (warp == 0) {
      value = lane < kWarps ? get<Value>(shared.warp_partials[lane]) : identity;
      tell_all(combine_lanes(value, combine));
    }
    return combine_lanes(hear_all(identity), combine);
  }

  // Each block gives a value that all its threads know; returns those of all blocks by rank, until the next exchange.
  template <typename Value>
  __device__ __forceinline__ const Partial* collect(const Value& value) {
    if (threadIdx.x < kWarpLanes) tell_all(value);
    barrier();
    const Partial* all = block_shared().exchange[phase_];
    phase_ ^= 1;
    return all;
  }

  __device__ int32_t minimum(int32_t value) {
    return all_reduce(value, INT32_MAX, [](int32_t a, int32_t b) { return min(a, b); });
  }

 private:
  // A block writes to all others and then reads its own memory alone: a remote read would cost its whole latency.
  // Two places in turn: when one is written again, all have passed a barrier after they read it.
  template <typename Value>
  __device__ __forceinline__ void tell_all(const Value& value) {
    if (threadIdx.x < size_) put(shared_of(threadIdx.x).exchange[phase_][rank_], value);
  }
  template <typename Value>
  __device__ __forceinline__ Value hear_all(const Value& identity) {
    barrier();
    const uint32_t lane = threadIdx.x % kWarpLanes;
    const Value value = lane < size_ ? get<Value>(block_shared().exchange[phase_][lane]) : identity;
    phase_ ^= 1;
    return value;
  }

  uint32_t rank_, size_;
  int phase_ = 0;
};

// Sums of the threads before this one, and of all.
template <typename Value>
struct Scanned {
  Value before, total;
};
template <typename Value>
__device__ __forceinline__ Scanned<Value> scan_threads(Value value, Value (BlockShared::*totals)[kWarps]) {
  auto& warp_totals = block_shared().*totals;
  const int warp = threadIdx.x / kWarpLanes, lane = threadIdx.x % kWarpLanes;
  Value inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpLanes; offset *= 2) {
    const Value other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();
  if (lane == kWarpLanes - 1) warp_totals[warp] = inclusive;
  __syncthreads();
  Value before = 0, total = 0;
  for (int i = 0; i < kWarps; ++i) {
    const Value of_warp = warp_totals[i];
    if (i < warp) before += of_warp;
    total += of_warp;
  }
  return {before + (inclusive - value), total};
}

// Order of float32 as unsigned integers; -0 and +0 have one key.
__device__ __forceinline__ uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float value_of_key(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key ^ 0x80000000u : ~key);
}

// e^((x - largest) * inverse), bit for bit as the CPU kernels with fused multiply-add round it, so that a token is
// drawn from the same weights; 0 below e^-87.3.
__device__ __forceinline__ float weight_of(float x, float largest, float inverse) {
  const float exponent = __fmul_rn(__fsub_rn(x, largest), inverse);
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: the whole number is in the low bits of the sum
  const float shifted = __fadd_rn(__fmul_rn(exponent, 1.4426950408889634f), kRounder);
  const float whole = __fsub_rn(shifted, kRounder);
  float r = fmaf(whole, -0.693145751953125f, exponent);
  r = fmaf(whole, -1.428606765330187e-6f, r);
  float p = fmaf(1.3981999507e-3f, r, 8.3334519073e-3f);
  p = fmaf(p, r, 4.1665795894e-2f);
  p = fmaf(p, r, 1.6666665459e-1f);
  p = fmaf(p, r, 0.5f);
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  const float scaled = __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  return exponent < -87.3f ? 0.0f : scaled;
}

}  // namespace pagemill::cuda::sampling
