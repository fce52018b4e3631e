// What the kernels over rows share: elements and their conversions, wide accesses, dispatch by dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "error.h"
#include "pagemill/params.h"

namespace pagemill::cuda {

using BFloat16 = __nv_bfloat16;
using Float16 = __half;

constexpr int kWarpLanes = 32;
constexpr int kAccessBytes = 16;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(Float16 x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float x) {
  return __float2half_rn(x);
}

// Neighbouring elements that move in one access (two where they are more than 16 bytes). Held as words: as elements the
// compiler takes those of 16 bits apart wherever control flow joins.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  static constexpr int kBytes = sizeof(T) * kCount;
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  Word words[kBytes / sizeof(Word)];
};

template <int kCount>
struct Floats {
  float values[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ Floats<kCount> to_floats(const Pack<T, kCount>& pack) {
  Floats<kCount> out;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.values[i] = __uint_as_float(pack.words[i]);
  } else if constexpr (kCount == 1) {
    T element;
    memcpy(&element, pack.words, sizeof(T));
    out.values[0] = to_float(element);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        out.values[2 * i] = __uint_as_float(pack.words[i] << 16);
        out.values[2 * i + 1] = __uint_as_float(pack.words[i] & 0xffff0000u);
      } else {
        __half2 pair;
        memcpy(&pair, &pack.words[i], sizeof(pair));
        const float2 wide = __half22float2(pair);
        out.values[2 * i] = wide.x, out.values[2 * i + 1] = wide.y;
      }
    }
  }
  return out;
}

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> to_pack(const Floats<kCount>& floats) {
  Pack<T, kCount> out;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.words[i] = __float_as_uint(floats.values[i]);
  } else if constexpr (kCount == 1) {
    const T element = from_float<T>(floats.values[0]);
    memcpy(out.words, &element, sizeof(T));
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<T, BFloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(floats.values[2 * i], floats.values[2 * i + 1]);
        memcpy(&out.words[i], &pair, sizeof(pair));
      } else {
        const __half2 pair = __floats2half2_rn(floats.values[2 * i], floats.values[2 * i + 1]);
        memcpy(&out.words[i], &pair, sizeof(pair));
      }
    }
  }
  return out;
}

template <int kCount, typename T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* source) {
  return *reinterpret_cast<const Pack<T, kCount>*>(source);
}
template <typename T, int kCount>
__device__ __forceinline__ void store_pack(T* target, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
}

// Elements of T in one wide access.
template <typename T>
constexpr int kPackOf = kAccessBytes / static_cast<int>(sizeof(T));

template <typename Index>
__host__ __device__ constexpr Index divide_up(Index a, Index b) {
  return (a + b - 1) / b;
}

inline bool is_aligned(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

// Calls the functor with a value of the element type of `dtype`.
template <typename Functor>
auto with_element_type(DType dtype, Functor functor) {
  switch (dtype) {
    case DType::kBFloat16:
      return functor(BFloat16{});
    case DType::kFloat16:
      return functor(Float16{});
    case DType::kFloat32:
      break;
  }
  return functor(float{});
}

// Kernels that follow one another in a stream overlap: the next one's blocks take their places while the last blocks of
// the one before still run, and wait there. A kernel launched by launch_overlapped() calls this before it touches
// memory.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns 0 or what fail() gave.
template <typename... Params, typename... Arguments>
int launch_overlapped(const char* operation, void (*kernel)(Params...), dim3 grid, unsigned threads,
                      cudaStream_t stream, const Arguments&... arguments) {
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = limits->compute_capability >= 90 ? 1 : 0;
  return check_cuda(operation, cudaLaunchKernelEx(&config, kernel, arguments...));
}

__device__ __forceinline__ int64_t index_at(const void* ids, bool is_int64, int64_t i) {
  return is_int64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// Whether the index may be used. Debug builds stop at one that may not and is no `skipped` mark.
__device__ __forceinline__ bool is_usable_index(const char* name, int64_t index, int64_t limit, int64_t skipped) {
  const bool usable = index >= 0 && index < limit;
#if defined(PAGEMILL_DEVICE_CHECKS)
  if (!usable && index != skipped) {
    printf("%s is %lld, outside 0 .. %lld\n", name, static_cast<long long>(index), static_cast<long long>(limit - 1));
    __trap();
  }
#endif
  return usable;
}
constexpr int64_t kNoSkipMark = INT64_MIN;

}  // namespace pagemill::cuda
