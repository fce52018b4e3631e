// What attention.cu chooses from. Each function checks nothing that attention.cu has checked, and returns 0 or what
// fail() gave.
#pragma once

#include <cuda_runtime.h>

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda {

// Tensor-core decode (attention_decode_*.cu): 16-bit queries, 16- or 8-bit cache.
int32_t decode_workers(const PagedAttentionParams& params);
int launch_decode(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream);

// Prefill with warp-group instructions (attention_wgmma_*.cu): sm_90 alone, 16-bit cache.
bool wgmma_prefill_supports(const PagedAttentionParams& params, int32_t compute_capability);
int launch_prefill_wgmma(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream);

// Prefill with mma (attention_mma_*.cu): sm_80 and later, 16- or 8-bit cache, every head size.
int launch_prefill_mma(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream);

// Float32 throughout (attention_simt_*.cu): queries of float32, 32- or 8-bit cache; decode entries and prefill tiles.
int32_t simt_workers(const PagedAttentionParams& params);
int launch_simt(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream);

}  // namespace pagemill::cuda
