// Launches the warp-group prefill kernel: tensor maps, shared memory, grid.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>

#include "attention_launch.h"
#include "attention_wgmma_kernel.cuh"
#include "attention_wgmma_launch.h"
#include "attention_wgmma_map.h"
#include "error.h"

namespace pagemill::cuda::wgmma {

// Query heads to a round of the work queue. Where the new tokens' keys and values do not fit the L2 cache together, a
// round takes what fills about half of it, or more heads where there would be too few items to keep all multiprocessors
// busy. A multiple of the heads that share a KV head; rounds are as even as can be.
inline int32_t heads_per_round(const PagedAttentionParams& p) {
  constexpr int64_t kMostBytes = 34 << 20, kUsualBytes = 17 << 20, kFewestItems = 512;
  const int64_t group = p.num_query_heads / p.num_kv_heads;
  const int64_t head_bytes = std::max<int64_t>(2 * p.num_tokens * p.head_size * dtype_bytes(p.dtype), 1);
  const int64_t head_items = std::max<int64_t>(p.num_tokens / kQueryRows * group, 1);
  if (head_bytes * p.num_kv_heads <= kMostBytes) return p.num_query_heads;
  const int64_t wanted = std::max(kUsualBytes / head_bytes, (kFewestItems + head_items - 1) / head_items);
  const int64_t most = std::clamp<int64_t>(std::min(wanted, kMostBytes / head_bytes), 1, p.num_kv_heads);
  const int64_t num_rounds = (p.num_kv_heads + most - 1) / most;
  return static_cast<int32_t>((p.num_kv_heads + num_rounds - 1) / num_rounds * group);
}

inline KernelParams kernel_params(const PagedAttentionParams& p, const AttentionLaunch& launch, int32_t key_tile) {
  KernelParams k{};
  k.out = p.out;
  k.lse = p.lse;
  k.plan = launch.plan;
  k.block_tables = p.block_tables;
  k.seq_slots = p.seq_slots;
  k.query_start = p.query_start;
  k.alibi_slopes = p.alibi_slopes;
  k.sinks = p.sinks;
  // The workspace begins with counters that are 0 between launches; without one, items are given out in a fixed order.
  const bool has_counter = launch.workspace != nullptr && launch.workspace_bytes >= int64_t{sizeof(int32_t)};
  k.counter = has_counter ? static_cast<int32_t*>(launch.workspace) : nullptr;
  k.out_token_stride = p.out_token_stride;
  k.out_head_stride = p.out_head_stride;
  k.block_table_stride = p.block_table_stride;
  k.num_table_rows = p.num_table_rows;
  k.max_blocks = p.max_blocks;
  k.num_query_heads = p.num_query_heads;
  k.num_kv_heads = p.num_kv_heads;
  k.group = p.num_query_heads / p.num_kv_heads;
  k.heads_per_round = heads_per_round(p);
  k.block_shift = std::countr_zero(static_cast<uint32_t>(p.block_size));
  k.box_rows = std::gcd(key_tile, p.block_size);
  k.window = p.window;
  k.scale = p.scale;
  k.scale_log2 = p.scale * kLog2E;
  k.soft_cap = p.soft_cap;
  return k;
}

// Key tile of a head size: what registers and shared memory hold.
constexpr int key_tile(int head_size) { return head_size <= 128 ? 128 : 80; }

template <class Traits>
int launch(const PagedAttentionParams& p, const KernelParams& k, cudaStream_t stream) {
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  TensorMaps maps;
  if (const int error = make_tensor_maps(p, {kQueryRows, k.box_rows, Traits::kChunk}, maps)) return error;
  constexpr int kSharedBytes = Traits::kDynamicBytes + Traits::kAlignment;
  const auto kernel = prefill_kernel<Traits>;
  const cudaError_t allowed = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (const int error = check_cuda("paged_attention", allowed)) return error;
  kernel<<<limits->num_multiprocessors, kNumThreads, kSharedBytes, stream>>>(k, maps.query, maps.key, maps.value);
  return check_cuda("paged_attention", cudaGetLastError());
}

inline bool has_plain_scores(const PagedAttentionParams& p) {
  return p.window < 0 && p.soft_cap == 0.0f && p.alibi_slopes == nullptr && p.sinks == nullptr && p.scale > 0.0f;
}

}  // namespace pagemill::cuda::wgmma

namespace pagemill::cuda {

template <typename T, int kHeadSize>
int launch_wgmma(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream) {
  using namespace wgmma;
  constexpr int kKeyTile = key_tile(kHeadSize);
  const KernelParams k = kernel_params(params, launch, kKeyTile);
  if (has_plain_scores(params)) {
    return wgmma::launch<Traits<T, kHeadSize, kKeyTile, PlainScores>>(params, k, stream);
  }
  return wgmma::launch<Traits<T, kHeadSize, kKeyTile, GeneralScores>>(params, k, stream);
}

}  // namespace pagemill::cuda
