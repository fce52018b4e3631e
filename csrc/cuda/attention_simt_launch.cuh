// Launches one instantiation of the float32 attention kernel.
#pragma once

#include "attention_simt.cuh"
#include "attention_simt_dispatch.h"
#include "kernel_setup.cuh"

namespace pagemill::cuda::simt {

template <typename S, bool kIs8Bit>
int launch_shape(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  constexpr auto kKernel = attention_simt_kernel<S, kIs8Bit>;
  constexpr int kSharedBytes = S::kSharedFloats * static_cast<int>(sizeof(float));
  const KernelSetup& setup = kernel_setup<kKernel>(S::kThreads, kSharedBytes);
  if (setup.error != cudaSuccess) return check_cuda("paged_attention (float32)", setup.error);
  const int64_t group = p.num_query_heads / p.num_kv_heads;
  // Ranges of rows that any plan of so many tokens and sequences can have: full ones, and one at each sequence's end.
  const int64_t ranges =
      (p.num_tokens * group / S::kRows + p.num_tokens * group / kDecodeTileRows + p.num_seqs) * p.num_kv_heads;
  const int grid = static_cast<int>(std::min<int64_t>(ranges, setup.resident_blocks));
  kKernel<<<grid, S::kThreads, kSharedBytes, stream>>>(p, launch.plan);
  return check_cuda("paged_attention (float32)", cudaGetLastError());
}

template <int kHeadSize>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  return p.kv_dtype == KvDType::kActivation ? launch_shape<Shape<kHeadSize>, false>(p, launch, stream)
                                            : launch_shape<Shape<kHeadSize>, true>(p, launch, stream);
}

}  // namespace pagemill::cuda::simt
