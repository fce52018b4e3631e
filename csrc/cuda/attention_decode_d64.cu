#include "attention_decode_launch.cuh"

namespace pagemill::cuda::decode {

template int launch_head_size<64, __nv_bfloat16>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int launch_head_size<64, __half>(const PagedAttentionParams&, const AttentionLaunch&, cudaStream_t);
template int32_t workers_of_head_size<64, __nv_bfloat16>(const PagedAttentionParams&);
template int32_t workers_of_head_size<64, __half>(const PagedAttentionParams&);

}  // namespace pagemill::cuda::decode
