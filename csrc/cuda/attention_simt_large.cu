#include "attention_simt_launch.cuh"

namespace pagemill::cuda::simt {

template int launch_head_size<112>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<128>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<192>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<256>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);

}  // namespace pagemill::cuda::simt
