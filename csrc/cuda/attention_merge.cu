// Joins two results of attention to disjoint sets of keys. Memory-bound: each number is read and written once, 16 bytes
// to a thread.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

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

// A block has whole rows, so that lse, which may be lse_a or lse_b, is written when all of a row have read those.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    merge_attention_kernel(const __grid_constant__ MergeAttentionParams p, uint32_t rows_per_block) {
  wait_for_previous_kernel();
  const uint32_t chunks_per_row = static_cast<uint32_t>(p.head_size) / Chunk<T>::kSize;
  const uint32_t row_in_block = threadIdx.x / chunks_per_row, chunk = threadIdx.x % chunks_per_row;
  const int64_t row = int64_t{blockIdx.x} * rows_per_block + row_in_block;
  const bool has_row = row_in_block < rows_per_block && row < p.num_rows;
  const int64_t index = row * chunks_per_row + chunk;
  Chunk<T> a, b;
  Shares shares;
  if (has_row) {
    const float lse_a = p.lse_a[row], lse_b = p.lse_b[row];
    a = static_cast<const Chunk<T>*>(p.a)[index];
    b = static_cast<const Chunk<T>*>(p.b)[index];
    shares = shares_of(lse_a, lse_b);
  }
  if (p.lse != nullptr) {
    __syncthreads();
    if (has_row && chunk == 0) p.lse[row] = shares.lse;
  }
  if (!has_row) return;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kSize; ++i) {
    a.numbers[i] = static_cast<T>(blend(shares, static_cast<float>(a.numbers[i]), static_cast<float>(b.numbers[i])));
  }
  static_cast<Chunk<T>*>(p.out)[index] = a;
}

int check(const MergeAttentionParams& p) {
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return fail("merge_attention: dtype %d is not supported; supported: float32, bfloat16, float16",
                static_cast<int>(p.dtype));
  }
  const int64_t multiple = 16 / dtype_bytes(p.dtype);
  if (p.head_size <= 0 || p.head_size % multiple != 0 || p.head_size > multiple * kThreads) {
    return fail("merge_attention: head_size %lld is not supported; supported: multiples of %lld up to %lld",
                static_cast<long long>(p.head_size), static_cast<long long>(multiple),
                static_cast<long long>(multiple * kThreads));
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
  const int64_t chunks_per_row = p.head_size / Chunk<T>::kSize;
  const int64_t rows_per_block = kThreads / chunks_per_row;
  return launch_overlapped("merge_attention", merge_attention_kernel<T>,
                           static_cast<unsigned>(divide_up(p.num_rows, rows_per_block)), kThreads, stream, p,
                           static_cast<uint32_t>(rows_per_block));
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
