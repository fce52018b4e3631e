// How keys and values enter the paged cache.
#pragma once

#include <cuda_fp8.h>

#include "rows_common.cuh"

namespace pagemill::cuda {

// Where a token's numbers go: the element offset of its slot for KV head 0, or -1 where it has none.
__device__ __forceinline__ int64_t slot_offset(const StoreKvParams& p, int64_t token) {
  const int64_t slot = p.slot_mapping[token];
  if (!is_usable_index("slot_mapping", slot, p.num_blocks * p.block_size, -1)) return -1;
  int64_t block, offset;
  if (slot <= INT32_MAX) {
    block = static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.block_size);
    offset = static_cast<uint32_t>(slot) % static_cast<uint32_t>(p.block_size);
  } else {
    block = slot / p.block_size, offset = slot % p.block_size;
  }
  return (block * p.num_kv_heads * p.block_size + offset) * p.head_size;
}

__device__ __forceinline__ int64_t head_offset(const StoreKvParams& p, int32_t head) {
  return static_cast<int64_t>(head) * p.block_size * p.head_size;
}

// Division by one number over and over: the quotient is that of IEEE division, which the CPU kernels use, wherever it
// is within 8 bits' range (Markstein's correction of a product with the rounded reciprocal).
struct Divisor {
  float divisor, reciprocal;
  __device__ __forceinline__ explicit Divisor(float d) : divisor(d), reciprocal(1.0f / d) {}
  __device__ __forceinline__ float divide(float x) const {
    const float quotient = __fmul_rn(x, reciprocal);
    const float corrected = fmaf(fmaf(-quotient, divisor, x), reciprocal, quotient);
    // Infinity, NaN and what overflows stay what they are.
    return fabsf(quotient) < 1e30f ? corrected : quotient;
  }
};

template <__nv_fp8_interpretation_t kFormat, typename T, int kCount>
__device__ __forceinline__ void store_fp8(uint8_t* target, const Pack<T, kCount>& pack, const float* scale) {
  Floats<kCount> quotients = to_floats(pack);
  auto& values = quotients.values;
  if (scale != nullptr) {
    const Divisor divisor(*scale);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = divisor.divide(values[i]);
  }
  if constexpr (kCount % 2 == 0) {
    struct alignas(kCount) {
      __nv_fp8x2_storage_t pairs[kCount / 2];
    } out;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      out.pairs[i] = __nv_cvt_float2_to_fp8x2(make_float2(values[2 * i], values[2 * i + 1]), __NV_SATFINITE, kFormat);
    }
    *reinterpret_cast<decltype(out)*>(target) = out;
  } else {
    *target = __nv_cvt_float_to_fp8(values[0], __NV_SATFINITE, kFormat);
  }
}

// Writes neighbouring numbers of one KV head at `offset` elements from the start of the cache.
template <typename T, int kCount>
__device__ __forceinline__ void store_to_cache(const StoreKvParams& p, void* cache, const float* scales, int32_t head,
                                               int64_t offset, const Pack<T, kCount>& pack) {
  if (p.kv_dtype == KvDType::kActivation) {
    store_pack(static_cast<T*>(cache) + offset, pack);
    return;
  }
  const float* scale = scales != nullptr ? scales + head : nullptr;
  uint8_t* target = static_cast<uint8_t*>(cache) + offset;
  if (p.kv_dtype == KvDType::kFp8E4M3) {
    store_fp8<__NV_E4M3>(target, pack, scale);
  } else {
    store_fp8<__NV_E5M2>(target, pack, scale);
  }
}

// Whether keys, values and caches allow 16-byte reads and writes of as many elements.
inline bool allows_packs(const StoreKvParams& p) {
  const int64_t count = kAccessBytes / dtype_bytes(p.dtype);
  const int64_t cache_bytes = count * kv_bytes(p.kv_dtype, p.dtype);
  return p.head_size % count == 0 && p.key_token_stride % count == 0 && p.key_head_stride % count == 0 &&
         p.value_token_stride % count == 0 && p.value_head_stride % count == 0 && is_aligned(p.key, kAccessBytes) &&
         is_aligned(p.value, kAccessBytes) && is_aligned(p.key_cache, cache_bytes) &&
         is_aligned(p.value_cache, cache_bytes);
}

}  // namespace pagemill::cuda
