// Float32 attention by head size: instantiated in attention_simt_{small,large}.cu.
#pragma once

#include <cuda_runtime.h>

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda::simt {

template <int kHeadSize>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream);

}  // namespace pagemill::cuda::simt
