// Decode attention over pages: few query rows against many keys, bound by reading the cache.
//
// Each warp computes on key tiles of its own (16 keys), which it copies into a ring of its own, so that no barrier of
// the thread block stands between a copy and its use. The ring runs on across the segments of the worker's range. At
// the end of a segment the warps' results are joined through shared memory.
#pragma once

#include "attention_decode_walk.cuh"

namespace pagemill::cuda::decode {

constexpr float kNoMaximum = -1e30f;  // below every score, yet finite: differences of maxima stay defined
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// What the warps of a block share.
template <typename C>
struct Shared {
  char* ring;
  float* values;     // [warps][kJoinRows][head size], groups of 8 floats rotated by the row
  float* maxima;     // [warps][kJoinRows]
  float* sums;       // [warps][kJoinRows]
  int32_t* message;  // from one thread to all

  __device__ explicit Shared(char* base) {
    ring = base;
    values = reinterpret_cast<float*>(base + C::kRingBytes);
    maxima = values + C::kJoinFloats;
    sums = maxima + C::kWarps * C::kJoinRows;
    message = reinterpret_cast<int32_t*>(sums + C::kWarps * C::kJoinRows);
  }

  // Where 4 or 8 adjacent floats of a row begin.
  __device__ __forceinline__ float* row_values(int warp, int row, int dim) {
    constexpr int kGroups = C::kHeadSize / 8;
    int group = dim / 8 + row;
    if (group >= kGroups) group -= kGroups;
    return values + (warp * C::kJoinRows + row) * C::kHeadSize + group * 8 + dim % 8;
  }
};

// Queries of an entry as matrix fragments, and what depends on a row. A lane has rows lane / 4 and lane / 4 + 8.
//
// Where registers do not hold the fragments too, they lie in the warp's part of the buffer in which results are joined.
template <typename C>
struct Queries {
  static constexpr int kSteps = C::kHeadSize / 16;
  static constexpr bool kInShared = C::kHeadSize > 128;
  static_assert(!kInShared || kSteps * 32 * 16 <= C::kJoinRows * C::kHeadSize * 4);
  uint32_t fragment[kInShared ? 1 : kSteps][4];
  const uint4* shared_fragment;  // of the lane; those of the steps are 32 apart
  float factor[2];               // of scores; to units of log2 where there is no soft cap
  float slope[2];
  int32_t position[2];
  int32_t all_begin, all_end;  // keys that every row sees

  __device__ __forceinline__ static uint32_t read_pair(const void* query, int64_t offset) {
    return __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(query) + offset));
  }

  __device__ __forceinline__ void operand(int step, uint32_t (&x)[4]) const {
    if constexpr (kInShared) {
      const uint4 four = shared_fragment[step * 32];
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = fragment[step][i];
    }
  }

  // All warps have left the buffer for joining, of which `memory` is this warp's part.
  __device__ __forceinline__ void load(const Arguments& a, const Walk& walk, float* memory, int32_t lane) {
    uint32_t loaded[kSteps][4];
    load_fragments(a, walk, lane, loaded);
    if constexpr (C::kIs8Bit && !std::is_same_v<typename C::Query, __half>) narrow(loaded);
    if constexpr (kInShared) {
      uint4* mine = reinterpret_cast<uint4*>(memory) + lane;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        mine[step * 32] = uint4{loaded[step][0], loaded[step][1], loaded[step][2], loaded[step][3]};
      }
      shared_fragment = mine;
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kSteps; ++i) fragment[i / 4][i % 4] = loaded[i / 4][i % 4];
    }
  }

 private:
  __device__ __forceinline__ void load_fragments(const Arguments& a, const Walk& walk, int32_t lane,
                                                 uint32_t (&loaded)[kSteps][4]) {
    const PagedAttentionParams& p = a.p;
    const float key_scale = C::kIs8Bit && p.key_scale != nullptr ? __ldg(p.key_scale + walk.kv_head) : 1.0f;
    const float base_factor = p.scale * key_scale * (p.soft_cap == 0.0f ? kLog2E : 1.0f / p.soft_cap);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t row = lane / 4 + 8 * half;
      const bool is_used = row < walk.entry.num_rows;
      const int32_t of_sequence = walk.entry.first_row + row;
      const int32_t token = token_of(a, of_sequence);
      const int32_t head = walk.kv_head * a.group + of_sequence - token * a.group;
      position[half] = walk.entry.first_position + token;
      slope[half] = is_used && p.alibi_slopes != nullptr ? __ldg(p.alibi_slopes + head) * kLog2E : 0.0f;
      factor[half] = base_factor;
      const int64_t start = (walk.entry.first_token + token) * p.query_token_stride + head * p.query_head_stride;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // In 8 bits a lane has four adjacent dimensions of a step, see scores().
        const int first = C::kIs8Bit ? 16 * step + 4 * (lane % 4) : 16 * step + 2 * (lane % 4);
        const int second = C::kIs8Bit ? first + 2 : first + 8;
        const uint32_t x = is_used ? read_pair(p.query, start + first) : 0u;
        const uint32_t y = is_used ? read_pair(p.query, start + second) : 0u;
        loaded[step][half] = x;
        loaded[step][half + 2] = y;
      }
    }
    all_end = walk.entry.all_end;
    all_begin = p.window >= 0 ? walk.entry.end_key - p.window : 0;
  }

  // bfloat16 to float16: a row whose numbers are too large is scaled by a power of two.
  __device__ __forceinline__ void narrow(uint32_t (&loaded)[kSteps][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const float2 pair = unpack(loaded[i / 2][half + 2 * (i % 2)]);
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
      const int shift = max(0, exponent - 14);
      const float down = __uint_as_float(static_cast<uint32_t>(127 - min(shift, 126)) << 23);
      factor[half] *= __uint_as_float(static_cast<uint32_t>(127 + min(shift, 126)) << 23);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        uint32_t& bits = loaded[i / 2][half + 2 * (i % 2)];
        const float2 pair = unpack(bits);
        bits = pack<__half>(pair.x * down, pair.y * down);
      }
    }
  }

  __device__ __forceinline__ static float2 unpack(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
};

// Weighted sum of values so far, of the lane's two rows.
template <typename C>
struct Accumulator {
  static constexpr int kGroups = C::kHeadSize / 8;
  float values[kGroups][4];
  float maximum[2], sum[2];  // the sum is of the lane's own keys

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) values[i][j] = 0.0f;
    }
    maximum[0] = maximum[1] = kNoMaximum;
    sum[0] = sum[1] = 0.0f;
  }
};

// Scores of a tile: s[n] has keys 8 n + 2 (lane % 4) + {0, 1}, of the lane's first row and then of its second.
template <typename C>
__device__ __forceinline__ void scores(const Queries<C>& q, uint32_t keys, int32_t lane, float (&s)[2][4]) {
  constexpr int kSteps = Queries<C>::kSteps;
  using T = typename C::Operand;
  float part[2][2][4] = {};
  const int32_t row = (lane / 16) * 8 + lane % 8;
  const uint32_t base = row * 128 + ((((lane / 8) & 1) ^ (row & 7)) << 4);
  if constexpr (C::kIs8Bit) {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      // A chunk has the 16 dimensions of a step. A lane gets four adjacent ones of a key: they stand for dimensions 2
      // t, 2 t + 1, 2 t + 8, 2 t + 9 of the product, in the queries as well.
      uint32_t bytes[4];
      load_matrices(bytes, keys + (step / 8) * C::kPanelBytes + (base ^ ((step % 8) << 4)));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (step + i >= kSteps) break;
        uint32_t x[4];
        q.operand(step + i, x);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          uint32_t b[2];
          widen<C::kCache == Cache::kE4M3>(bytes[2 * n + i], b[0], b[1]);
          multiply_add<T>(part[i][n], x, b[0], b[1]);
        }
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t b[4];
      const int chunk = 2 * step;
      load_matrices(b, keys + (chunk / 8) * C::kPanelBytes + (base ^ ((chunk % 8) << 4)));
      uint32_t x[4];
      q.operand(step, x);
      multiply_add<T>(part[step % 2][0], x, b[0], b[1]);
      multiply_add<T>(part[step % 2][1], x, b[2], b[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = part[0][n][i] + part[1][n][i];
  }
}

// Whether logits are products times a positive factor, which the exponent's multiplication takes in.
__device__ __forceinline__ bool is_linear(const PagedAttentionParams& p) {
  return p.soft_cap == 0.0f && p.alibi_slopes == nullptr && p.scale > 0.0f;
}

// Scale, soft cap, ALiBi and mask.
template <typename C>
__device__ __forceinline__ void adjust(const Arguments& a, const Queries<C>& q, int32_t key, int32_t lane,
                                       float (&s)[2][4]) {
  if (!is_linear(a.p)) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] *= q.factor[i / 2];
    }
  }
  if (a.p.soft_cap != 0.0f) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] = tanh_from_exp2(s[n][i]) * (a.p.soft_cap * kLog2E);
    }
  }
  const int32_t first_key = key + 2 * (lane % 4);
  if (a.p.alibi_slopes != nullptr) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[n][i] += q.slope[i / 2] * static_cast<float>(first_key + 8 * n + i % 2 - q.position[i / 2]);
      }
    }
  }
  if (key + kDecodeTileKeys > q.all_end || key < q.all_begin) {
    const int32_t window = a.p.window >= 0 ? a.p.window : 0x7fffffff;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int32_t distance = q.position[i / 2] - (first_key + 8 * n + i % 2);
        if (distance < 0 || distance >= window) s[n][i] = -__int_as_float(0x7f800000);
      }
    }
  }
}

// Weights in place of the scores of some tiles, with the running maximum and sum.
template <typename C, int kTiles>
__device__ __forceinline__ void weigh(const Arguments& a, const Queries<C>& q, float (&s)[kTiles][2][4],
                                      Accumulator<C>& o) {
  float scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float largest = s[0][0][2 * half];
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) largest = fmaxf(largest, s[i / 4][i / 2 % 2][2 * half + i % 2]);
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float multiplier = is_linear(a.p) ? q.factor[half] : 1.0f;
    const float maximum = fmaxf(o.maximum[half], largest * multiplier);
    scale[half] = exp2_fast(o.maximum[half] - maximum);
    o.maximum[half] = maximum;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      float& x = s[i / 4][i / 2 % 2][2 * half + i % 2];
      x = exp2_fast(fmaf(x, multiplier, -maximum));
      sum += x;
    }
    o.sum[half] = fmaf(o.sum[half], scale[half], sum);
  }
  if (__any_sync(~0u, scale[0] != 1.0f || scale[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < Accumulator<C>::kGroups; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o.values[i][j] *= scale[j / 2];
    }
  }
}

template <typename C>
__device__ __forceinline__ void add_values(const float (&s)[2][4], uint32_t values, int32_t lane, Accumulator<C>& o) {
  using T = typename C::Operand;
  const uint32_t weights[4] = {pack<T>(s[0][0], s[0][1]), pack<T>(s[0][2], s[0][3]), pack<T>(s[1][0], s[1][1]),
                               pack<T>(s[1][2], s[1][3])};
  const int32_t row = lane % 16;
  const uint32_t base = row * 128 + (((lane / 16) ^ (row & 7)) << 4);
#pragma unroll
  for (int chunk = 0; chunk < C::kRowChunks; chunk += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, values + (chunk / 8) * C::kPanelBytes + (base ^ ((chunk % 8) << 4)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (chunk + i >= C::kRowChunks) break;
      if constexpr (C::kIs8Bit) {
        // A lane has dimensions 2 g, 2 g + 1 of two keys in each register: the even ones make one product, the odd
        // ones another.
        uint32_t even[2], odd[2];
        widen_apart<C::kCache == Cache::kE4M3>(b[2 * i], even[0], odd[0]);
        widen_apart<C::kCache == Cache::kE4M3>(b[2 * i + 1], even[1], odd[1]);
        multiply_add<T>(o.values[2 * (chunk + i)], weights, even[0], even[1]);
        multiply_add<T>(o.values[2 * (chunk + i) + 1], weights, odd[0], odd[1]);
      } else {
        multiply_add<T>(o.values[chunk + i], weights, b[2 * i], b[2 * i + 1]);
      }
    }
  }
}

}  // namespace pagemill::cuda::decode
