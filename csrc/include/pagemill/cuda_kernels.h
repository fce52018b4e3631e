// C interface of the CUDA kernels: the names and Params of kernels.h, on device memory, in the order of a stream.
//
// Each function returns 0 after the launch; 1 where an argument is wrong and nothing was launched, or 2 where CUDA
// failed, with a message in pagemill_cuda_last_error() of the calling thread. None allocates or synchronises, so each
// can be captured in a CUDA graph. `stream` is a cudaStream_t of the current device. Params' pointers are device memory
// unless said otherwise. What the CPU kernels check by reading memory (slots, block ids, token ids, positions) is
// checked on the device in debug builds alone (PAGEMILL_DEVICE_CHECKS); elsewhere a slot or row outside its table is
// skipped.
#pragma once

#include "pagemill/attention_plan.h"
#include "pagemill/params.h"

namespace pagemill {

struct CudaDeviceInfo {
  int32_t compute_capability;  // 90 for 9.0
  int32_t num_multiprocessors;
  int64_t l2_bytes, memory_bytes;
  char name[64];
};

// out = x · Wᵀ for few rows, where reading the weights is all the time. 16-bit, sums in float32. Gated: the weight has
// the rows of a gate and as many of `up`, and out = silu(x · gateᵀ) * (x · upᵀ). The weight is read while the kernel
// before in the stream may still run: that one must not write it.
struct SkinnyLinearParams {
  void* out;           // [num_rows, num_outputs]
  const void* x;       // [num_rows, num_inputs]
  const void* weight;  // [num_outputs, num_inputs], gated [2 * num_outputs, num_inputs], contiguous
  void* workspace;     // device, zeroed once before its first use; kernels leave it reusable
  int64_t workspace_bytes;
  int64_t num_rows, num_outputs, num_inputs;  // num_rows at most 16
  int64_t out_stride, x_stride;
  DType dtype;
  bool is_gated;
};

}  // namespace pagemill

extern "C" {

const char* pagemill_cuda_last_error();
int pagemill_cuda_device_count(int32_t* count);
int pagemill_cuda_device_info(int32_t device, pagemill::CudaDeviceInfo* info);

int pagemill_cuda_rms_norm(const pagemill::RmsNormParams* params, void* stream);
int pagemill_cuda_rotary(const pagemill::RotaryParams* params, void* stream);
int pagemill_cuda_rope_and_store(const pagemill::RotaryParams* rotary, const pagemill::StoreKvParams* store,
                                 void* stream);
int pagemill_cuda_store_kv(const pagemill::StoreKvParams* params, void* stream);
int pagemill_cuda_activation_and_mul(const pagemill::ActivationParams* params, void* stream);
int pagemill_cuda_gather_rows(const pagemill::GatherRowsParams* params, void* stream);
int pagemill_cuda_prepare_step(const pagemill::PrepareStepParams* params, void* stream);
int pagemill_cuda_scatter(const pagemill::ScatterParams* params, void* stream);
// The addresses and block ids are read from host memory during the call.
int pagemill_cuda_copy_blocks(const pagemill::CopyBlocksParams* params, void* stream);
int pagemill_cuda_swap_blocks(const pagemill::SwapBlocksParams* params, void* stream);
// workspace: bytes as given by pagemill_cuda_sample_workspace, zeroed once before its first use.
int64_t pagemill_cuda_sample_workspace(const pagemill::SampleParams* params);
int pagemill_cuda_sample(const pagemill::SampleParams* params, void* workspace, void* stream);
int pagemill_cuda_token_logprobs(const pagemill::TokenLogprobsParams* params, void* workspace, void* stream);
int pagemill_cuda_merge_attention(const pagemill::MergeAttentionParams* params, void* stream);

// Thread blocks of the decode kernel that the current device runs at once, for these dtypes and this head size: the
// num_workers of a plan. 0 with an error where they are not supported.
int32_t pagemill_cuda_attention_workers(const pagemill::PagedAttentionParams* params);
// By the plan: v1 or v2 for sequences with few query rows, the prefill kernel for the others.
int pagemill_cuda_paged_attention(const pagemill::PagedAttentionParams* params, const pagemill::AttentionLaunch* launch,
                                  void* stream);
// The decode kernels by name. All sequences must be decode entries of the plan. v1: one pass over all keys of an
// (entry, KV head). v2: pieces, joined by the one that finishes last.
int pagemill_cuda_paged_attention_v1(const pagemill::PagedAttentionParams* params,
                                     const pagemill::AttentionLaunch* launch, void* stream);
int pagemill_cuda_paged_attention_v2(const pagemill::PagedAttentionParams* params,
                                     const pagemill::AttentionLaunch* launch, void* stream);

int64_t pagemill_cuda_skinny_linear_workspace(const pagemill::SkinnyLinearParams* params);
// 1 where the kernel is faster than a general library's product for this shape, by measurement; otherwise 0.
int32_t pagemill_cuda_skinny_linear_wins(const pagemill::SkinnyLinearParams* params);
int pagemill_cuda_skinny_linear(const pagemill::SkinnyLinearParams* params, void* stream);
}
