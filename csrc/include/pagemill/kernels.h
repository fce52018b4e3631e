// C interface of the CPU kernels.
//
// Each function returns 0, or non-zero with a message in pagemill_last_error() (of the calling thread) and nothing
// written. Safe to call from any thread; calls share one thread pool (thread_pool.h).
#pragma once

#include "pagemill/params.h"

extern "C" {

const char* pagemill_last_error();

int pagemill_rms_norm(const pagemill::RmsNormParams* params);
int pagemill_rotary(const pagemill::RotaryParams* params);
int pagemill_rope_and_store(const pagemill::RotaryParams* rotary, const pagemill::StoreKvParams* store);
int pagemill_store_kv(const pagemill::StoreKvParams* params);
int pagemill_paged_attention(const pagemill::PagedAttentionParams* params);
int pagemill_activation_and_mul(const pagemill::ActivationParams* params);
int pagemill_gather_rows(const pagemill::GatherRowsParams* params);
int pagemill_prepare_step(const pagemill::PrepareStepParams* params);
int pagemill_scatter(const pagemill::ScatterParams* params);
int pagemill_merge_attention(const pagemill::MergeAttentionParams* params);
int pagemill_swap_blocks(const pagemill::SwapBlocksParams* params);
int pagemill_copy_blocks(const pagemill::CopyBlocksParams* params);
int pagemill_sample(const pagemill::SampleParams* params);
int pagemill_dequantize(const pagemill::DequantizeParams* params);
int pagemill_token_logprobs(const pagemill::TokenLogprobsParams* params);
}
