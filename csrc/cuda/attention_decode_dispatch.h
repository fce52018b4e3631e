// The decode kernel by head size and type of the queries: one instantiation per attention_decode_d*.cu, so that they
// are compiled in parallel.
#pragma once

#include <cuda_runtime.h>

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill::cuda::decode {

template <int kHeadSize, typename T>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream);

// Thread blocks that the device runs at once; 0 with fail().
template <int kHeadSize, typename T>
int32_t workers_of_head_size(const PagedAttentionParams& p);

}  // namespace pagemill::cuda::decode
