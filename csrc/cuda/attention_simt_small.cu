#include "attention_simt_launch.cuh"

namespace pagemill::cuda::simt {

template int launch_head_size<64>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<80>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<96>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);

}  // namespace pagemill::cuda::simt
