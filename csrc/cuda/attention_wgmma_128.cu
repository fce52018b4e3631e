#include "attention_wgmma_launch.cuh"

namespace pagemill::cuda {

template int launch_wgmma<__nv_bfloat16, 128>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_wgmma<__half, 128>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);

// Without the instructions the kernel has no barriers in shared memory.
bool has_wgmma_code() {
  using Kernel = wgmma::Traits<__nv_bfloat16, 128, wgmma::key_tile(128), wgmma::PlainScores>;
  static const bool has_code = [] {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, wgmma::prefill_kernel<Kernel>);
    return error == cudaSuccess && attributes.sharedSizeBytes >= sizeof(wgmma::Barriers);
  }();
  return has_code;
}

}  // namespace pagemill::cuda
