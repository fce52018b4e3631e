// Instructions of the decode kernel: matrix fragments, asynchronous copies, conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pagemill::cuda::decode {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a · b: 16 x 8 sums of 16 products.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two numbers in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Absolute error near 2^-22, which tanh.approx does not have.
__device__ __forceinline__ float tanh_from_exp2(float x) {
  constexpr float kTwoLog2E = 2.8853900817779268f;
  return 1.0f - __fdividef(2.0f, exp2_fast(x * kTwoLog2E) + 1.0f);
}

__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Writes zeros where bytes is 0, without reading.
__device__ __forceinline__ void copy_async_or_zero(uint32_t shared, const void* global, int32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Adds 1 and returns what was there before. What this thread has seen is seen by a thread that later gets a larger
// number, and by those that synchronise with it.
__device__ __forceinline__ int32_t arrive_at(int32_t* counter) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Kernels before this one in the stream have finished, where it was launched before that.
__device__ __forceinline__ void wait_for_previous_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Two numbers of 8 bits as float16, exactly: the bytes of `pair`.
template <bool kE4M3>
__device__ __forceinline__ uint32_t widen_pair(uint32_t pair) {
  uint32_t wide;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(pair)));
    return wide;
  }
#endif
  wide = __byte_perm(pair, 0, 0x1404);
  if constexpr (kE4M3) {
    // Read as float16, the exponent has a bias of 15 instead of 7. NaN would be 480, which alone overflows when it is
    // multiplied with 142: infinity times 0 makes it NaN again.
    wide = (wide & 0x80008000u) | ((wide & 0x7f007f00u) >> 1);
    const __half2 number = __hmul2(reinterpret_cast<const __half2&>(wide), __float2half2_rn(256.0f));
    const __half2 exact = __hfma2(__hmul2(number, __float2half2_rn(142.0f)), __float2half2_rn(0.0f), number);
    wide = reinterpret_cast<const uint32_t&>(exact);
  }
  return wide;
}

// Four numbers in order.
template <bool kE4M3>
__device__ __forceinline__ void widen(uint32_t four, uint32_t& first, uint32_t& second) {
  first = widen_pair<kE4M3>(four);
  second = widen_pair<kE4M3>(four >> 16);
}

// Even has the first and third of four, odd the second and fourth.
template <bool kE4M3>
__device__ __forceinline__ void widen_apart(uint32_t four, uint32_t& even, uint32_t& odd) {
  if constexpr (kE4M3) {
    widen<true>(__byte_perm(four, 0, 0x3120), even, odd);
  } else {
    even = __byte_perm(four, 0, 0x2404);
    odd = four & 0xff00ff00u;
  }
}

}  // namespace pagemill::cuda::decode
