#include "store_kv.cuh"

#include <algorithm>

#include "error.h"
#include "pagemill/cuda_kernels.h"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;

// A thread moves the same pack of a key and of a value. A block has tokens_per_block tokens, or a part of one.
template <typename T, int kCount>
__global__ void __launch_bounds__(kThreads)
    store_kv_kernel(const __grid_constant__ StoreKvParams p, uint32_t tokens_per_block) {
  wait_for_previous_kernel();
  const uint32_t packs_per_head = static_cast<uint32_t>(p.head_size) / kCount;
  const uint32_t packs_per_token = static_cast<uint32_t>(p.num_kv_heads) * packs_per_head;
  const uint32_t token_in_block = threadIdx.x / packs_per_token;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * tokens_per_block + token_in_block;
  if (token_in_block >= tokens_per_block || token >= p.num_tokens) return;
  for (uint32_t i = threadIdx.x - token_in_block * packs_per_token; i < packs_per_token; i += kThreads) {
    const uint32_t head = i / packs_per_head;
    const int64_t element = static_cast<int64_t>(i - head * packs_per_head) * kCount;
    const auto key = load_pack<kCount>(static_cast<const T*>(p.key) + token * p.key_token_stride +
                                       head * p.key_head_stride + element);
    const auto value = load_pack<kCount>(static_cast<const T*>(p.value) + token * p.value_token_stride +
                                         head * p.value_head_stride + element);
    const int64_t slot = slot_offset(p, token);
    if (slot < 0) return;
    const auto kv_head = static_cast<int32_t>(head);
    const int64_t target = slot + head_offset(p, kv_head) + element;
    store_to_cache(p, p.key_cache, p.key_scale, kv_head, target, key);
    store_to_cache(p, p.value_cache, p.value_scale, kv_head, target, value);
  }
}

template <typename T, int kCount>
int launch_store_kv(const StoreKvParams& p, cudaStream_t stream) {
  const int64_t packs_per_token = static_cast<int64_t>(p.num_kv_heads) * (p.head_size / kCount);
  const auto tokens_per_block = static_cast<uint32_t>(std::max<int64_t>(1, kThreads / packs_per_token));
  const int64_t blocks = divide_up<int64_t>(p.num_tokens, tokens_per_block);
  if (blocks > INT32_MAX) {
    return fail("store_kv: num_tokens %lld is not supported", static_cast<long long>(p.num_tokens));
  }
  return launch_overlapped("store_kv", store_kv_kernel<T, kCount>, static_cast<unsigned>(blocks), kThreads, stream, p,
                           tokens_per_block);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" int pagemill_cuda_store_kv(const pagemill::StoreKvParams* params, void* stream) {
  using namespace pagemill;
  const StoreKvParams& p = *params;
  if (p.num_tokens == 0 || p.num_kv_heads == 0) return 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  return cuda::with_element_type(p.dtype, [&](auto element) {
    using T = decltype(element);
    return cuda::allows_packs(p) ? cuda::launch_store_kv<T, cuda::kPackOf<T>>(p, cuda_stream)
                                 : cuda::launch_store_kv<T, 1>(p, cuda_stream);
  });
}
