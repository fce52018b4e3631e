// Attention in float32 throughout, on the ordinary arithmetic units: decode entries and prefill tiles alike.
//
// A row (one query head of one new token) belongs to one warp, which folds the row's keys in ascending order, kKeys at
// a time from a multiple of kKeys on, each dot product and each sum in one fixed order. So a row's result depends on
// its own query and keys alone, to the last bit: not on the batch, nor on how a prompt was cut, nor on the plan's
// pieces.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda::simt {

template <int kHeadSize_>
struct Shape {
  static constexpr int kHeadSize = kHeadSize_;
  static constexpr int kWarps = 8, kThreads = kWarps * 32;
  static constexpr int kKeys = kHeadSize <= 128 ? 64 : 32;
  static constexpr int kRows = kHeadSize <= 192 ? 32 : 16;  // what 99 KB of shared memory hold
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr int kLaneKeys = kKeys / 32;
  static constexpr int kLaneColumns = (kHeadSize + 31) / 32;
  static constexpr int kKeyStride = kHeadSize + 4;  // 16-byte loads of one column of 8 rows hit different banks
  static constexpr int kSharedFloats = kRows * kHeadSize + kKeys * kKeyStride + kKeys * kHeadSize + kRows * kKeys;
};

template <typename S>
struct SharedTiles {
  float* query;    // [kRows][kHeadSize]
  float* keys;     // [kKeys][kKeyStride]
  float* values;   // [kKeys][kHeadSize]
  float* weights;  // [kRows][kKeys]

  __device__ explicit SharedTiles(float* shared)
      : query(shared),
        keys(query + S::kRows * S::kHeadSize),
        values(keys + S::kKeys * S::kKeyStride),
        weights(values + S::kKeys * S::kHeadSize) {}
};

// Rows of one KV head of one sequence; row = new token * group + head in group.
struct RowRange {
  int32_t kv_head, group;
  int32_t first_row, num_rows;
  int32_t first_token;     // of the sequence, in query
  int32_t first_position;  // of the sequence's first new token
  int32_t begin_key, end_key;
  const int32_t* table;

  __device__ int32_t position(int row) const { return first_position + (first_row + row) / group; }
  __device__ int64_t token(int row) const { return first_token + (first_row + row) / group; }
  __device__ int32_t head(int row) const { return kv_head * group + (first_row + row) % group; }
};

// Prefill tiles come first: they cost most.
template <typename S>
struct WorkList {
  const PlanHeader& header;
  const DecodeEntry* entries;
  const PrefillTile* tiles;
  int32_t group, num_kv_heads, parts;  // a prefill tile is `parts` ranges of kRows rows

  __device__ WorkList(const PagedAttentionParams& p, const int32_t* plan)
      : header(*reinterpret_cast<const PlanHeader*>(plan)),
        entries(reinterpret_cast<const DecodeEntry*>(plan + header.entries_offset)),
        tiles(reinterpret_cast<const PrefillTile*>(plan + header.prefill_offset)),
        group(p.num_query_heads / p.num_kv_heads),
        num_kv_heads(p.num_kv_heads),
        parts((kPrefillTileQueries * group + S::kRows - 1) / S::kRows) {}

  __device__ int32_t num_tile_items() const { return header.num_prefill_tiles * parts * num_kv_heads; }
  __device__ int32_t size() const { return num_tile_items() + header.num_entries * num_kv_heads; }

  // False for a part of a tile that has no rows.
  __device__ bool get(const PagedAttentionParams& p, int32_t index, RowRange& range) const {
    int32_t seq;
    range.group = group;
    range.kv_head = index % num_kv_heads;
    if (index < num_tile_items()) {
      const PrefillTile tile = tiles[index / (num_kv_heads * parts)];
      const int32_t first = (parts - 1 - index / num_kv_heads % parts) * S::kRows;
      seq = tile.seq;
      range.first_row = tile.first_query * group + first;
      range.num_rows = min(S::kRows, tile.num_queries * group - first);
    } else {
      const DecodeEntry entry = entries[(index - num_tile_items()) / num_kv_heads];
      seq = entry.seq;
      range.first_row = entry.first_row;
      range.num_rows = entry.num_rows;
    }
    if (range.num_rows <= 0) return false;
    range.first_token = p.query_start[seq];
    range.first_position = p.context_lens[seq] - (p.query_start[seq + 1] - range.first_token);
    range.end_key = range.position(range.num_rows - 1) + 1;
    range.begin_key = p.window >= 0 ? max(0, range.position(0) - p.window + 1) / S::kKeys * S::kKeys : 0;
    range.table = p.block_tables + (p.seq_slots != nullptr ? p.seq_slots[seq] : seq) * p.block_table_stride;
    return true;
  }
};

__device__ inline void copy_16_async(float* destination, const void* source, int bytes) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(destination));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(bytes) : "memory");
}

__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// How an 8-bit number becomes a float: its bits are moved to where a float has them, and the difference of the
// exponents' biases is a factor. From `special` on a magnitude is infinity or NaN.
struct Fp8Rule {
  int shift;
  float factor;
  uint32_t special, special_bits;  // the latter are set in such a number

  __device__ explicit Fp8Rule(KvDType dtype) {
    const bool is_e4m3 = dtype == KvDType::kFp8E4M3;
    shift = is_e4m3 ? 20 : 21;
    factor = is_e4m3 ? 0x1p120f : 0x1p112f;
    special = is_e4m3 ? 0x7f : 0x7c;
    special_bits = is_e4m3 ? 0x7fc00000u : 0x7f800000u;
  }

  __device__ float operator()(uint32_t byte) const {
    const uint32_t magnitude = byte & 0x7fu, bits = (byte & 0x80u) << 24 | magnitude << shift;
    return magnitude < special ? __uint_as_float(bits) * factor : __uint_as_float(bits | special_bits);
  }
};

// Rows of the cache that begin at first_key; rows from end_key on and rows without a page become zeros.
template <typename S, bool kIs8Bit>
__device__ inline void load_tile(const PagedAttentionParams& p, const RowRange& range, const void* cache, int first_key,
                                 float* destination, int row_stride) {
  constexpr int kPerChunk = kIs8Bit ? 16 : 4;
  constexpr int kChunks = S::kHeadSize / kPerChunk;
  const int block_bits = 31 - __clz(p.block_size);
  for (int i = threadIdx.x; i < S::kKeys * kChunks; i += S::kThreads) {
    const int row = i / kChunks, column = i % kChunks * kPerChunk, key = first_key + row;
    const bool is_seen = key < range.end_key && key >> block_bits < static_cast<int32_t>(p.max_blocks);
    const int32_t page = is_seen ? range.table[key >> block_bits] : -1;
#if defined(PAGEMILL_DEVICE_CHECKS)
    if (page >= p.num_blocks || (is_seen && page < 0 && p.window < 0)) __trap();
#endif
    const bool is_present = static_cast<uint32_t>(page) < static_cast<uint32_t>(p.num_blocks);
    const int64_t cache_row =
        is_present ? ((int64_t{page} * p.num_kv_heads + range.kv_head) << block_bits) + (key & (p.block_size - 1)) : 0;
    float* to = destination + row * row_stride + column;
    if constexpr (kIs8Bit) {
      const Fp8Rule rule(p.kv_dtype);
      uint4 bytes = make_uint4(0, 0, 0, 0);
      if (is_present) {
        bytes = *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(cache) + cache_row * S::kHeadSize + column);
      }
      const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        *reinterpret_cast<float4*>(to + w * 4) = make_float4(rule(words[w] & 0xff), rule(words[w] >> 8 & 0xff),
                                                             rule(words[w] >> 16 & 0xff), rule(words[w] >> 24));
      }
    } else {
      copy_16_async(to, static_cast<const float*>(cache) + cache_row * S::kHeadSize + column, is_present ? 16 : 0);
    }
  }
}

template <typename S>
__device__ inline void load_query(const PagedAttentionParams& p, const RowRange& range, float* destination) {
  constexpr int kChunks = S::kHeadSize / 4;
  for (int i = threadIdx.x; i < S::kRows * kChunks; i += S::kThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    const bool is_present = row < range.num_rows;
    const float* source = static_cast<const float*>(p.query);
    if (is_present) source += range.token(row) * p.query_token_stride + range.head(row) * p.query_head_stride + column;
    copy_16_async(destination + i * 4, source, is_present ? 16 : 0);
  }
}

// One row's running softmax; every lane of the warp holds the same numbers.
template <typename S>
struct Row {
  float largest = -INFINITY, sum = 0.0f;
  float out[S::kLaneColumns] = {};  // columns lane, lane + 32, ...
};

struct LogitRule {
  float scale, soft_cap;
  int32_t window;

  __device__ float logit(float product, float slope, int key, int position) const {
    if (key > position || (window >= 0 && key <= position - window)) return -INFINITY;
    float logit = product * scale;
    if (soft_cap != 0.0f) logit = soft_cap * tanhf(logit / soft_cap);
    return fmaf(slope, static_cast<float>(key - position), logit);
  }
};

// Products of the warp's rows, warp, warp + kWarps, ..., with the lane's keys, lane, lane + 32, ...
template <typename S>
__device__ inline void score_rows(const SharedTiles<S>& tiles, int num_warp_rows,
                                  float (&scores)[S::kWarpRows][S::kLaneKeys]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int r = 0; r < S::kWarpRows; ++r) {
#pragma unroll
    for (int k = 0; k < S::kLaneKeys; ++k) scores[r][k] = 0.0f;
  }
#pragma unroll 4
  for (int d = 0; d < S::kHeadSize; d += 4) {
    float4 key[S::kLaneKeys];
#pragma unroll
    for (int k = 0; k < S::kLaneKeys; ++k) {
      key[k] = *reinterpret_cast<const float4*>(tiles.keys + (lane + 32 * k) * S::kKeyStride + d);
    }
#pragma unroll
    for (int r = 0; r < S::kWarpRows; ++r) {
      if (r >= num_warp_rows) break;
      const float4 q = *reinterpret_cast<const float4*>(tiles.query + (warp + r * S::kWarps) * S::kHeadSize + d);
#pragma unroll
      for (int k = 0; k < S::kLaneKeys; ++k) {
        float& sum = scores[r][k];
        sum = fmaf(q.w, key[k].w, fmaf(q.z, key[k].z, fmaf(q.y, key[k].y, fmaf(q.x, key[k].x, sum))));
      }
    }
  }
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

// Logits become weights, which go to shared memory; the row's sums are scaled to its new largest logit.
template <typename S>
__device__ inline void weigh_row(const LogitRule& rule, float slope, int position, int first_key,
                                 float (&scores)[S::kLaneKeys], Row<S>& row, float* weights) {
  const int lane = threadIdx.x & 31;
  float largest = -INFINITY;
#pragma unroll
  for (int k = 0; k < S::kLaneKeys; ++k) {
    scores[k] = rule.logit(scores[k], slope, first_key + lane + 32 * k, position);
    largest = fmaxf(largest, scores[k]);
  }
  largest = fmaxf(row.largest, warp_max(largest));
  const float reference = largest == -INFINITY ? 0.0f : largest;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < S::kLaneKeys; ++k) {
    const float weight = expf(scores[k] - reference);
    weights[lane + 32 * k] = weight;
    sum += weight;
  }
  const float factor = expf(row.largest - reference);
  row.largest = largest;
  row.sum = fmaf(row.sum, factor, warp_sum(sum));
#pragma unroll
  for (int c = 0; c < S::kLaneColumns; ++c) row.out[c] *= factor;
}

template <typename S>
__device__ inline void add_values(const SharedTiles<S>& tiles, int num_warp_rows, Row<S> (&rows)[S::kWarpRows]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 2
  for (int k = 0; k < S::kKeys; k += 4) {
    float value[4][S::kLaneColumns];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int c = 0; c < S::kLaneColumns; ++c) {
        const int column = lane + 32 * c;
        value[i][c] = column < S::kHeadSize ? tiles.values[(k + i) * S::kHeadSize + column] : 0.0f;
      }
    }
#pragma unroll
    for (int r = 0; r < S::kWarpRows; ++r) {
      if (r >= num_warp_rows) break;
      const float4 w = *reinterpret_cast<const float4*>(tiles.weights + (warp + r * S::kWarps) * S::kKeys + k);
#pragma unroll
      for (int c = 0; c < S::kLaneColumns; ++c) {
        float& out = rows[r].out[c];
        out = fmaf(w.w, value[3][c], fmaf(w.z, value[2][c], fmaf(w.y, value[1][c], fmaf(w.x, value[0][c], out))));
      }
    }
  }
}

template <typename S>
__device__ inline void write_row(const PagedAttentionParams& p, const RowRange& range, int row, float value_scale,
                                 const Row<S>& state) {
  const int lane = threadIdx.x & 31, head = range.head(row);
  const int64_t token = range.token(row);
  float sum = state.sum, largest = state.largest, factor = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    largest = fmaxf(state.largest, sink);
    factor = expf(state.largest - largest);
    sum = fmaf(sum, factor, expf(sink - largest));
  }
  factor = sum > 0.0f ? factor * value_scale / sum : 0.0f;
  float* out = static_cast<float*>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
#pragma unroll
  for (int c = 0; c < S::kLaneColumns; ++c) {
    const int column = lane + 32 * c;
    if (column < S::kHeadSize) out[column] = state.out[c] * factor;
  }
  if (p.lse != nullptr && lane == 0) p.lse[token * p.num_query_heads + head] = largest + logf(sum);
}

template <typename S, bool kIs8Bit>
__device__ inline void attend(const PagedAttentionParams& p, const RowRange& range, const SharedTiles<S>& tiles) {
  const int warp = threadIdx.x >> 5;
  const int num_warp_rows = (range.num_rows - warp + S::kWarps - 1) / S::kWarps;
  const float key_scale = kIs8Bit && p.key_scale != nullptr ? p.key_scale[range.kv_head] : 1.0f;
  const float value_scale = kIs8Bit && p.value_scale != nullptr ? p.value_scale[range.kv_head] : 1.0f;
  const LogitRule rule{p.scale * key_scale, p.soft_cap, p.window};
  Row<S> rows[S::kWarpRows];

  __syncthreads();  // the previous range's readers have left
  load_query<S>(p, range, tiles.query);
  load_tile<S, kIs8Bit>(p, range, p.key_cache, range.begin_key, tiles.keys, S::kKeyStride);
  for (int first_key = range.begin_key; first_key < range.end_key; first_key += S::kKeys) {
    wait_copies();
    __syncthreads();
    load_tile<S, kIs8Bit>(p, range, p.value_cache, first_key, tiles.values, S::kHeadSize);
    float scores[S::kWarpRows][S::kLaneKeys];
    score_rows<S>(tiles, num_warp_rows, scores);
#pragma unroll
    for (int r = 0; r < S::kWarpRows; ++r) {
      if (r >= num_warp_rows) break;
      const int row = warp + r * S::kWarps;
      const float slope = p.alibi_slopes != nullptr ? p.alibi_slopes[range.head(row)] : 0.0f;
      weigh_row<S>(rule, slope, range.position(row), first_key, scores[r], rows[r], tiles.weights + row * S::kKeys);
    }
    wait_copies();
    __syncthreads();
    if (first_key + S::kKeys < range.end_key) {
      load_tile<S, kIs8Bit>(p, range, p.key_cache, first_key + S::kKeys, tiles.keys, S::kKeyStride);
    }
    add_values<S>(tiles, num_warp_rows, rows);
  }
#pragma unroll
  for (int r = 0; r < S::kWarpRows; ++r) {
    if (r < num_warp_rows) write_row<S>(p, range, warp + r * S::kWarps, value_scale, rows[r]);
  }
}

template <typename S, bool kIs8Bit>
__global__ void __launch_bounds__(S::kThreads, 2)
    attention_simt_kernel(const __grid_constant__ PagedAttentionParams p, const int32_t* __restrict__ plan) {
  extern __shared__ __align__(16) float shared_floats[];
  const SharedTiles<S> tiles(shared_floats);
  const WorkList<S> work(p, plan);
  const int32_t size = work.size();
  for (int32_t index = blockIdx.x; index < size; index += gridDim.x) {
    RowRange range;
    if (work.get(p, index, range)) attend<S, kIs8Bit>(p, range, tiles);
  }
}

}  // namespace pagemill::cuda::simt
