// Instances of the warp-group prefill kernel; attention_wgmma_<head size>.cu has each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention_launch.h"

namespace pagemill::cuda {

// Whether the library was built for sm_90a: for plain sm_90 the kernel is empty.
bool has_wgmma_code();

template <typename T, int kHeadSize>
int launch_wgmma(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream);

}  // namespace pagemill::cuda
