#include "attention_wgmma_launch.cuh"

namespace pagemill::cuda {

template int launch_wgmma<__nv_bfloat16, 96>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_wgmma<__half, 96>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);

}  // namespace pagemill::cuda
