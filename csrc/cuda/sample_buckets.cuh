// What is looked for in a row, and how entries are counted into buckets for it.
#pragma once

#include "sample_slice.cuh"

namespace pagemill::cuda::sampling {

// Weights of entries: e^((x - largest) * inverse).
struct Softmax {
  float largest, inverse;
  __device__ __forceinline__ float operator()(float x) const { return weight_of(x, largest, inverse); }
};

// What to look for. By count: the count-th largest entry. By mass: where the sum of weights reaches share * total.
struct Goal {
  uint32_t count;
  double share;
  float floor;           // entries below are out already
  bool takes_minus_inf;  // whether entries of -inf count
  int32_t vocab_size;
};
// Which entries take part.
struct Taken {
  Goal goal;
  __device__ __forceinline__ bool operator()(float x, int32_t id) const {
    return x >= goal.floor && (x > -kInfinity || (goal.takes_minus_inf && id < goal.vocab_size));
  }
};
struct ByCount {
  static constexpr bool kNeedsMass = false;
};
struct ByMass {
  static constexpr bool kNeedsMass = true;
};

constexpr int kRest = kBuckets - 1;  // the bucket of all that is not counted

// Equal steps of value from the largest entry down.
struct LinearBuckets {
  float largest, scale, width;

  __device__ __forceinline__ int of(float x) const {
    // The whole number ends up in the low bits of the sum. -inf and NaN are far away.
    constexpr float kRounder = 8388608.0f;  // 2^23
    const float steps = fmaf(__fsub_rn(largest, x), scale, kRounder);
    return __float_as_int(fminf(steps, kRounder + static_cast<float>(kRest))) - 0x4B000000;
  }
  __device__ __forceinline__ int count_at(float x, int32_t) const { return of(x); }
  __device__ __forceinline__ float middle(int bucket) const { return largest - static_cast<float>(bucket) * width; }

  // The least value whose bucket is `bucket` or a larger one's. A warp: each round tests 32 keys.
  __device__ float least_of(int bucket) const {
    const uint32_t lane = threadIdx.x % kWarpLanes, top = ordered_key(largest);
    uint32_t outside = 0;  // the greatest key known to be below
#pragma unroll 1
    for (int shift = 27; shift > -5; shift -= 5) {
      const int step_bits = max(shift, 0);
      const uint64_t key = static_cast<uint64_t>(outside) + (static_cast<uint64_t>(lane + 1) << step_bits);
      const bool is_inside = key >= top || of(value_of_key(static_cast<uint32_t>(key))) <= bucket;
      const uint32_t inside_lanes = __ballot_sync(0xffffffffu, is_inside);
      const uint32_t first = inside_lanes == 0 ? kWarpLanes : __ffs(inside_lanes) - 1;
      outside = static_cast<uint32_t>(
          min(outside + (static_cast<uint64_t>(first) << step_bits), static_cast<uint64_t>(top) - 1));
    }
    return value_of_key(outside + 1);
  }
  __device__ float least_above(int bucket) const { return bucket == 0 ? kInfinity : least_of(bucket - 1); }
};

// Divides the values whose keys are low .. high.
struct KeyBuckets {
  uint32_t low, high;
  int shift;
  Taken takes;

  __device__ __forceinline__ int count_at(float x, int32_t id) const {
    const uint32_t key = ordered_key(x);
    return key <= high && key >= low && takes(x, id) ? static_cast<int>((high - key) >> shift) : kRest;
  }
  __device__ __forceinline__ float middle(int bucket) const {
    const uint32_t offset = min((static_cast<uint32_t>(bucket) << shift) + ((1u << shift) >> 1), high - low);
    return value_of_key(high - offset);
  }
  __device__ __forceinline__ float least_of(int bucket) const {
    const uint64_t below = static_cast<uint64_t>(bucket + 1) << shift;
    return value_of_key(below > high - low ? low : static_cast<uint32_t>(high - below + 1));
  }
  __device__ __forceinline__ float least_above(int bucket) const {
    return bucket == 0 ? value_of_key(high + 1) : least_of(bucket - 1);
  }
};
__device__ __forceinline__ KeyBuckets divide_keys(uint32_t low, uint32_t high, const Taken& takes) {
  int shift = 0;
  while (((high - low) >> shift) > static_cast<uint32_t>(kBuckets - 2)) ++shift;
  return {low, high, shift, takes};
}

}  // namespace pagemill::cuda::sampling
