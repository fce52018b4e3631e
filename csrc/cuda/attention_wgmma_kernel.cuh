// Causal attention of many queries to pages with warp-group products and tensor copies (sm_90a).
//
// The scheme follows FlashAttention-3 (Shah et al., 2024): a producer warp keeps queries, keys and values coming; two
// consumer warp groups take turns at the tensor cores, and each computes weights while its product with V runs. A
// thread block stays on its multiprocessor and takes work items until there are none.
#pragma once

#include "attention_wgmma_consumer.cuh"
#include "attention_wgmma_producer.cuh"
#include "attention_wgmma_traits.cuh"

namespace pagemill::cuda::wgmma {

template <class Traits>
__global__ void __launch_bounds__(kNumThreads, 1)
    prefill_kernel(const __grid_constant__ KernelParams params, const __grid_constant__ CUtensorMap query_map,
                   const __grid_constant__ CUtensorMap key_map, const __grid_constant__ CUtensorMap value_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ uint8_t dynamic_memory[];
  __shared__ Barriers barriers;
  const uint32_t shared =
      (shared_address(dynamic_memory) + Traits::kAlignment - 1) / Traits::kAlignment * Traits::kAlignment;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(query_map);
    prefetch_tensor_map(key_map);
    prefetch_tensor_map(value_map);
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&barriers.query_full[i]), 1);
      barrier_init(shared_address(&barriers.key_full[i]), 1);
      barrier_init(shared_address(&barriers.value_full[i]), 1);
      // By the consumers and by the copier of values, which reads the item.
      barrier_init(shared_address(&barriers.query_empty[i]), kConsumerWarps + 1);
      barrier_init(shared_address(&barriers.key_empty[i]), kConsumerWarps);
      barrier_init(shared_address(&barriers.value_empty[i]), kConsumerWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int group = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  if (group == 0) {
    release_registers<kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
    if (warp == 0) {
      produce_keys<Traits>(params, query_map, key_map, barriers, shared);
    } else if (warp == 1) {
      produce_values<Traits>(params, value_map, barriers, shared);
    }
  } else {
    claim_registers<kConsumerRegisters>();
    Consumer<Traits>(params, barriers, shared, group - 1).run();
  }
#else
  __trap();
#endif
}

}  // namespace pagemill::cuda::wgmma
