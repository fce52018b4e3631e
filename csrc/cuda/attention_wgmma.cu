// What the warp-group prefill kernel covers, and which instance serves a call.
#include "attention_launch.h"
#include "attention_wgmma_launch.h"
#include "error.h"

namespace pagemill::cuda {
namespace {

// Of addresses and strides in memory, which the copy engine asks for.
constexpr int64_t kCopyAlignment = 16;

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kCopyAlignment == 0; }

bool is_copy_stride(int64_t stride, DType dtype) {
  return stride > 0 && stride * dtype_bytes(dtype) % kCopyAlignment == 0;
}

template <typename T>
int launch(const PagedAttentionParams& params, const AttentionLaunch& launch, cudaStream_t stream) {
  switch (params.head_size) {
    case 64:
      return launch_wgmma<T, 64>(params, launch, stream);
    case 80:
      return launch_wgmma<T, 80>(params, launch, stream);
    case 96:
      return launch_wgmma<T, 96>(params, launch, stream);
    case 112:
      return launch_wgmma<T, 112>(params, launch, stream);
    case 128:
      return launch_wgmma<T, 128>(params, launch, stream);
    case 192:
      return launch_wgmma<T, 192>(params, launch, stream);
    case 256:
      return launch_wgmma<T, 256>(params, launch, stream);
    default:
      return fail("attention: head_size %d has no warp-group kernel", params.head_size);
  }
}

}  // namespace

bool wgmma_prefill_supports(const PagedAttentionParams& p, int32_t compute_capability) {
  // Machine code of sm_90a runs on 9.0 alone.
  if (compute_capability != 90 || !has_wgmma_code()) return false;
  if (p.kv_dtype != KvDType::kActivation || p.dtype == DType::kFloat32) return false;
  switch (p.head_size) {
    case 64:
    case 80:
    case 96:
    case 112:
    case 128:
    case 192:
    case 256:
      break;
    default:
      return false;
  }
  return is_aligned(p.out) && is_aligned(p.query) && is_aligned(p.key_cache) && is_aligned(p.value_cache) &&
         is_copy_stride(p.query_token_stride, p.dtype) && is_copy_stride(p.query_head_stride, p.dtype) &&
         is_copy_stride(p.out_token_stride, p.dtype) && is_copy_stride(p.out_head_stride, p.dtype);
}

int launch_prefill_wgmma(const PagedAttentionParams& params, const AttentionLaunch& launch_params,
                         cudaStream_t stream) {
  if (params.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(params, launch_params, stream);
  return launch<__half>(params, launch_params, stream);
}

}  // namespace pagemill::cuda
