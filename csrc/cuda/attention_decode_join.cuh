// The end of a segment: the warps' results become one, and partial results of several thread blocks become the output.
#pragma once

#include "attention_decode.cuh"

namespace pagemill::cuda::decode {

__device__ __forceinline__ float warp_maximum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Which ranges have a part of a segment's (entry, KV head), and where the parts lie in the workspace.
struct Parts {
  int32_t count;                    // 1: the segment is the whole
  int32_t mine;                     // number of the segment's part
  int32_t first_slot, second_slot;  // of parts 0 and 1; later ones follow at `stride`
  int32_t stride;
  int32_t owner, sharers;  // thread blocks that have parts
  bool is_last_of_range;   // no further part of this (entry, KV head) comes from this range

  __device__ __forceinline__ int64_t slot(int32_t part) const {
    return part == 0 ? first_slot : second_slot + (part - 1) * stride;
  }
};

__device__ __forceinline__ Parts find_parts(const Walk& walk, const DecodeRange& range, int32_t self) {
  Parts parts;
  // Beyond its first (entry, KV head) a range shares only the one in which it ends.
  const bool ends_inside = walk.end + walk.left < walk.entry.num_tiles;
  parts.sharers = walk.in_first_pair ? range.first_sharers : ends_inside ? range.last_sharers : 1;
  parts.owner = walk.in_first_pair ? range.first_owner : self;
  if (walk.piece_tiles != 0) {
    const int32_t tiles = walk.entry.num_tiles;
    parts.count = (tiles + walk.piece_tiles - 1) / walk.piece_tiles;
    parts.mine = walk.begin / walk.piece_tiles;
    parts.first_slot = walk.entry.first_piece + walk.kv_head * parts.count;
    parts.second_slot = parts.first_slot + 1;
    parts.stride = 1;
    parts.is_last_of_range = walk.end == tiles || walk.left == 0;
  } else {
    parts.count = walk.begin == 0 && walk.end == walk.entry.num_tiles ? 1 : parts.sharers;
    parts.mine = self - parts.owner;
    parts.first_slot = 2 * parts.owner + 1;
    parts.second_slot = 2 * (parts.owner + 1);
    parts.stride = 2;
    parts.is_last_of_range = true;
  }
  return parts;
}

// What is known of a row apart from its values.
struct RowTotal {
  float maximum = kNoMaximum;  // in units of log2
  float sum = 0.0f;
};

template <typename C>
__device__ __forceinline__ RowTotal row_total(const Shared<C>& shared, int row, float (&scale)[C::kWarps]) {
  RowTotal total;
#pragma unroll
  for (int w = 0; w < C::kWarps; ++w) total.maximum = fmaxf(total.maximum, shared.maxima[w * C::kJoinRows + row]);
#pragma unroll
  for (int w = 0; w < C::kWarps; ++w) {
    scale[w] = exp2_fast(shared.maxima[w * C::kJoinRows + row] - total.maximum);
    total.sum = fmaf(shared.sums[w * C::kJoinRows + row], scale[w], total.sum);
  }
  return total;
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float scale) {
  sum = float4{fmaf(x.x, scale, sum.x), fmaf(x.y, scale, sum.y), fmaf(x.z, scale, sum.z), fmaf(x.w, scale, sum.w)};
}

template <typename C>
__device__ __forceinline__ float4 row_sum(Shared<C>& shared, int row, int dim, const float (&scale)[C::kWarps]) {
  float4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int w = 0; w < C::kWarps; ++w) {
    add_scaled(sum, *reinterpret_cast<const float4*>(shared.row_values(w, row, dim)), scale[w]);
  }
  return sum;
}

// Rows 8 half .. 8 half + 7 of the warp's accumulator to shared memory.
template <typename C>
__device__ __forceinline__ void share(const Accumulator<C>& o, int half, Shared<C>& shared, int warp, int lane) {
  const int row = lane / 4, t = lane % 4;
  if (t == 0) {
    shared.maxima[warp * C::kJoinRows + row] = o.maximum[half];
    shared.sums[warp * C::kJoinRows + row] = o.sum[half];
  }
  if constexpr (C::kIs8Bit) {
#pragma unroll
    for (int chunk = 0; chunk < C::kRowChunks; ++chunk) {
      const float (&even)[4] = o.values[2 * chunk];
      const float (&odd)[4] = o.values[2 * chunk + 1];
      *reinterpret_cast<float4*>(shared.row_values(warp, row, 16 * chunk + 4 * t)) =
          float4{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]};
    }
  } else {
#pragma unroll
    for (int group = 0; group < Accumulator<C>::kGroups; ++group) {
      *reinterpret_cast<float2*>(shared.row_values(warp, row, 8 * group + 2 * t)) =
          float2{o.values[group][2 * half], o.values[group][2 * half + 1]};
    }
  }
}

// A row of an entry on its way to the output, by a whole warp.
template <typename C>
struct OutputRow {
  using T = typename C::Query;
  uint16_t* out;
  float factor;

  // Takes in the sink and writes the log of the denominator.
  __device__ __forceinline__ OutputRow(const Arguments& a, const Walk& walk, int row, RowTotal total, int lane) {
    const PagedAttentionParams& p = a.p;
    const int32_t of_sequence = walk.entry.first_row + row;
    const int32_t token = token_of(a, of_sequence);
    const int32_t head = walk.kv_head * a.group + of_sequence - token * a.group;
    const int64_t out_token = walk.entry.first_token + token;
    factor = C::kIs8Bit && p.value_scale != nullptr ? __ldg(p.value_scale + walk.kv_head) : 1.0f;
    if (p.sinks != nullptr) {
      const float sink = __ldg(p.sinks + head) * kLog2E;
      const float maximum = fmaxf(total.maximum, sink);
      const float rescale = exp2_fast(total.maximum - maximum);
      total.sum = fmaf(total.sum, rescale, exp2_fast(sink - maximum));
      total.maximum = maximum;
      factor *= rescale;
    }
    factor = total.sum > 0.0f ? factor / total.sum : 0.0f;
    out = static_cast<uint16_t*>(p.out) + out_token * p.out_token_stride + head * p.out_head_stride;
    if (p.lse != nullptr && lane == 0) {
      p.lse[out_token * p.num_query_heads + head] = (total.maximum + log2f(total.sum)) * kLn2;
    }
  }

  __device__ __forceinline__ void write(int dim, const float4& sum) const {
    *reinterpret_cast<uint2*>(out + dim) =
        uint2{pack<T>(sum.x * factor, sum.y * factor), pack<T>(sum.z * factor, sum.w * factor)};
  }
};

// Joins the warps' results of rows 8 half .. 8 half + 7, which are in shared memory: to the output, or to `slot` of the
// workspace where it is not null.
template <typename C>
__device__ __forceinline__ void join_warps(const Arguments& a, const Walk& walk, float* slot, int max_rows, int half,
                                           Shared<C>& shared, int warp, int lane) {
  const int rows = min(C::kJoinRows, walk.entry.num_rows - half * C::kJoinRows);
  for (int row = warp; row < rows; row += C::kWarps) {
    float scale[C::kWarps];
    const RowTotal total = row_total<C>(shared, row, scale);
    const int of_entry = half * C::kJoinRows + row;
    if (slot == nullptr) {
      const OutputRow<C> output(a, walk, of_entry, total, lane);
      for (int dim = 4 * lane; dim < C::kHeadSize; dim += 128) output.write(dim, row_sum<C>(shared, row, dim, scale));
    } else {
      for (int dim = 4 * lane; dim < C::kHeadSize; dim += 128) {
        __stcg(reinterpret_cast<float4*>(slot + of_entry * C::kHeadSize + dim), row_sum<C>(shared, row, dim, scale));
      }
      if (lane == 0) {
        __stcg(slot + max_rows * C::kHeadSize + of_entry, total.maximum);
        __stcg(slot + max_rows * (C::kHeadSize + 1) + of_entry, total.sum);
      }
    }
  }
}

// Joins a row's partial results, in order, by one warp. Reads of several parts are in flight at a time.
template <typename C>
__device__ __forceinline__ void join_parts(const Arguments& a, const Walk& walk, const Parts& parts, int max_rows,
                                           int row, int lane) {
  constexpr int kVectors = (C::kHeadSize + 127) / 128;
  constexpr int kBatch = 8;
  const int64_t slot_floats = int64_t{max_rows} * (C::kHeadSize + 4);  // decode_slot_floats()
  RowTotal total;
  float4 sums[kVectors] = {};
  float weight = 0.0f;  // of part `first - first % 32 + lane`
  for (int first = 0; first < parts.count; first += kBatch) {
    float4 x[kBatch][kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float* slot = a.partials + parts.slot(min(first + i, parts.count - 1)) * slot_floats;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int dim = min(4 * lane + 128 * v, C::kHeadSize - 4);
        x[i][v] = __ldcg(reinterpret_cast<const float4*>(slot + row * C::kHeadSize + dim));
      }
    }
    if (first % 32 == 0) {
      const bool is_part = first + lane < parts.count;
      const float* slot = a.partials + parts.slot(min(first + lane, parts.count - 1)) * slot_floats;
      const float part_maximum = is_part ? __ldcg(slot + max_rows * C::kHeadSize + row) : kNoMaximum;
      const float part_sum = is_part ? __ldcg(slot + max_rows * (C::kHeadSize + 1) + row) : 0.0f;
      const float maximum = fmaxf(total.maximum, warp_maximum(part_maximum));
      const float rescale = exp2_fast(total.maximum - maximum);
      weight = is_part ? exp2_fast(part_maximum - maximum) : 0.0f;
      total.sum = fmaf(total.sum, rescale, warp_sum(part_sum * weight));
      total.maximum = maximum;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        sums[v] = float4{sums[v].x * rescale, sums[v].y * rescale, sums[v].z * rescale, sums[v].w * rescale};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float scale = __shfl_sync(~0u, weight, (first + i) % 32);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_scaled(sums[v], x[i][v], scale);
    }
  }
  const OutputRow<C> output(a, walk, row, total, lane);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (4 * lane + 128 * v < C::kHeadSize) output.write(4 * lane + 128 * v, sums[v]);
  }
}

// Whether this range is the last of those that have parts. Makes their partial results visible to it.
__device__ __forceinline__ bool arrive(const Parts& parts, int32_t* counters, int32_t* message) {
  __syncthreads();
  if (parts.sharers == 1) return true;
  if (threadIdx.x == 0) {
    const bool last = arrive_at(counters + parts.owner) == parts.sharers - 1;
    *message = last;
    if (last) counters[parts.owner] = 0;  // for the next launch
  }
  __syncthreads();
  return *message != 0;
}

template <typename C>
__device__ __forceinline__ void finish_segment(const Arguments& a, const Walk& walk, const DecodeRange& range,
                                               int32_t range_index, int32_t max_rows, Accumulator<C>& o,
                                               Shared<C>& shared, int warp, int lane) {
  const Parts parts = find_parts(walk, range, range_index);
  float* slot = nullptr;
  if (parts.count != 1) {
    slot = a.partials + parts.slot(parts.mine) * max_rows * (C::kHeadSize + 4);  // decode_slot_floats()
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    o.sum[half] += __shfl_xor_sync(~0u, o.sum[half], 1);
    o.sum[half] += __shfl_xor_sync(~0u, o.sum[half], 2);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half * C::kJoinRows >= walk.entry.num_rows) break;
    __syncthreads();  // the buffer has been read
    share<C>(o, half, shared, warp, lane);
    __syncthreads();
    join_warps<C>(a, walk, slot, max_rows, half, shared, warp, lane);
  }
  if (parts.count == 1 || !parts.is_last_of_range) return;
  if (!arrive(parts, a.counters, shared.message)) return;
  for (int row = warp; row < walk.entry.num_rows; row += C::kWarps) join_parts<C>(a, walk, parts, max_rows, row, lane);
}

}  // namespace pagemill::cuda::decode
