#include "attention_mma_launch.cuh"

namespace pagemill::cuda::mma {

template int launch_head_size<112, __nv_bfloat16>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<112, __half>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);

}  // namespace pagemill::cuda::mma
