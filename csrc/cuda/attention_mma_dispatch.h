// The mma prefill by head size and type of the queries: one instantiation per attention_mma_d*.cu, so that they are
// compiled in parallel.
#pragma once

#include <cuda_runtime.h>

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda::mma {

template <int kHeadSize, typename T>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream);

}  // namespace pagemill::cuda::mma
