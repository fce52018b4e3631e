#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention_launch.h"
#include "attention_mma_dispatch.h"
#include "error.h"

namespace pagemill::cuda {
namespace {

template <int kHeadSize>
int launch_dtype(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? mma::launch_head_size<kHeadSize, __nv_bfloat16>(p, launch, stream)
                                     : mma::launch_head_size<kHeadSize, __half>(p, launch, stream);
}

}  // namespace

int launch_prefill_mma(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  switch (p.head_size) {
    case 64:
      return launch_dtype<64>(p, launch, stream);
    case 80:
      return launch_dtype<80>(p, launch, stream);
    case 96:
      return launch_dtype<96>(p, launch, stream);
    case 112:
      return launch_dtype<112>(p, launch, stream);
    case 128:
      return launch_dtype<128>(p, launch, stream);
    case 192:
      return launch_dtype<192>(p, launch, stream);
    case 256:
      return launch_dtype<256>(p, launch, stream);
    default:
      return fail("paged_attention: head_size %d is not supported; supported: 64, 80, 96, 112, 128, 192, 256",
                  p.head_size);
  }
}

}  // namespace pagemill::cuda
