// Joins two results of attention to disjoint sets of keys. Memory-bound: each number is read and written once, 16 bytes
// to a thread.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "error.h"
#include "pagemill/cuda_kernels.h"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  T numbers[kSize];
};

struct Shares {
  float a, b, lse;
};

// Of the two sides in the joint softmax; both are 0 where neither saw a key.
__device__ inline Shares shares_of(float lse_a, float lse_b) {
  const float larger = fmaxf(lse_a, lse_b);
  if (larger == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  const float a = expf(lse_a - larger), b = expf(lse_b - larger), sum = a + b;
  return {a / sum, b / sum, larger + logf(sum)};
}

// What a side that saw no key left in its rows is not looked at.
__device__ inline float blend(const Shares& shares, float a, float b) {
  return (shares.a != 0.0f ? shares.a * a : 0.0f) + (shares.b != 0.0f ? shares.b * b : 0.0f);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) merge_attention_kernel(const MergeAttentionParams p) {
  const int64_t chunks_per_row = p.head_size / Chunk<T>::kSize;
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = index / chunks_per_row;
  if (row >= p.num_rows) return;
  const Shares shares = shares_of(p.lse_a[row], p.lse_b[row]);
  Chunk<T> a = static_cast<const Chunk<T>*>(p.a)[index];
  const Chunk<T> b = static_cast<const Chunk<T>*>(p.b)[index];
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    a.numbers[i] = static_cast<T>(blend(shares, static_cast<float>(a.numbers[i]), static_cast<float>(b.numbers[i])));
  }
  static_cast<Chunk<T>*>(p.out)[index] = a;
}

// In a launch of its own, after the rows: lse may be lse_a or lse_b, which other threads of the row read.
__global__ void __launch_bounds__(kThreads) merge_lse_kernel(const MergeAttentionParams p) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < p.num_rows) p.lse[row] = shares_of(p.lse_a[row], p.lse_b[row]).lse;
}

int check(const MergeAttentionParams& p) {
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return fail("merge_attention: dtype %d is not supported; supported: float32, bfloat16, float16",
                static_cast<int>(p.dtype));
  }
  const int64_t multiple = 16 / dtype_bytes(p.dtype);
  if (p.head_size <= 0 || p.head_size % multiple != 0) {
    return fail("merge_attention: head_size %lld is not supported; supported: multiples of %lld",
                static_cast<long long>(p.head_size), static_cast<long long>(multiple));
  }
  if (p.num_rows < 0 || p.num_rows > (int64_t{INT32_MAX} * kThreads) / p.head_size) {
    return fail("merge_attention: num_rows %lld is not supported", static_cast<long long>(p.num_rows));
  }
  if (p.num_rows == 0) return 0;
  const struct {
    const char* name;
    const void* pointer;
    uintptr_t alignment;
  } pointers[] = {{"out", p.out, 16}, {"a", p.a, 16}, {"b", p.b, 16}, {"lse_a", p.lse_a, 4}, {"lse_b", p.lse_b, 4}};
  for (const auto& named : pointers) {
    if (named.pointer == nullptr) return fail("merge_attention: %s is missing", named.name);
    if (reinterpret_cast<uintptr_t>(named.pointer) % named.alignment != 0) {
      return fail("merge_attention: %s must begin at a multiple of %d bytes", named.name,
                  static_cast<int>(named.alignment));
    }
  }
  return 0;
}

template <typename T>
int launch(const MergeAttentionParams& p, cudaStream_t stream) {
  const int64_t chunks = p.num_rows * (p.head_size / Chunk<T>::kSize);
  merge_attention_kernel<T><<<(chunks + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  if (const int error = check_cuda("merge_attention", cudaGetLastError())) return error;
  if (p.lse == nullptr) return 0;
  merge_lse_kernel<<<(p.num_rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(p);
  return check_cuda("merge_attention", cudaGetLastError());
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" int pagemill_cuda_merge_attention(const pagemill::MergeAttentionParams* params, void* stream) {
  using namespace pagemill;
  if (const int error = cuda::check(*params)) return error;
  if (params->num_rows == 0) return 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (params->dtype) {
    case DType::kBFloat16:
      return cuda::launch<__nv_bfloat16>(*params, cuda_stream);
    case DType::kFloat16:
      return cuda::launch<__half>(*params, cuda_stream);
    default:
      return cuda::launch<float>(*params, cuda_stream);
  }
}
