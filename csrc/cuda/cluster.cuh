// Thread block clusters: blocks that can read each other's shared memory (sm_90 and later). Elsewhere a cluster is one
// block.
#pragma once

#include <cstdint>

namespace pagemill::cuda::cluster {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ uint32_t rank() {
  uint32_t value;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  return value;
}
__device__ __forceinline__ uint32_t size() {
  uint32_t value;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
  return value;
}
// A barrier of all threads of all blocks, in two parts; shared memory written before the first is seen after the
// second.
__device__ __forceinline__ void arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same object in the shared memory of the block of that rank.
template <typename T>
__device__ __forceinline__ T* shared_of(T* object, uint32_t rank) {
  uint64_t address;
  asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(object)), "r"(rank));
  return reinterpret_cast<T*>(address);
}
#else
__device__ __forceinline__ uint32_t rank() { return 0; }
__device__ __forceinline__ uint32_t size() { return 1; }
__device__ __forceinline__ void arrive() {}
__device__ __forceinline__ void wait() { __syncthreads(); }
template <typename T>
__device__ __forceinline__ T* shared_of(T* object, uint32_t) {
  return object;
}
#endif

__device__ __forceinline__ void barrier() {
  arrive();
  wait();
}

}  // namespace pagemill::cuda::cluster
