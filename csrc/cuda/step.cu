// What a step reads about its tokens, from histories and block tables in device memory; and the changes to those.
// Kernels of microseconds: one thread a token or value, and few dependent reads.
#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;
// Ends of rows that a block keeps in shared memory, where a search takes a tenth of the time.
constexpr int kSharedEnds = 4096;

// The first row that ends behind `token`, or num_rows.
__device__ __forceinline__ int32_t find_row(const int32_t* ends, int32_t num_rows, int64_t token) {
  int32_t first = 0, last = num_rows;
  while (first < last) {
    const int32_t middle = (first + last) >> 1;
    if (ends[middle] > token) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

struct PreparedToken {
  int32_t id = 0, position = 0;
  int64_t slot = -1;
};

__device__ __forceinline__ PreparedToken prepare_token(const PrepareStepParams& p, int32_t row, int64_t token) {
  const int64_t slot = p.seq_slots[row];
  const int64_t position = int64_t{p.context_lens[row]} - p.query_start[row + 1] + token;
  if (!is_usable_index("seq_slots", slot, p.num_slots, kNoSkipMark)) return {};
  if (!is_usable_index("position", position, p.max_model_len, kNoSkipMark)) return {};
  const auto place = static_cast<uint32_t>(position), block_size = static_cast<uint32_t>(p.block_size);
  const uint32_t block = place / block_size;
  if (!is_usable_index("block of position", block, p.max_blocks, kNoSkipMark)) return {};
  const int32_t id = p.history[slot * p.history_stride + position];
  const int64_t block_id = p.block_table[slot * p.block_table_stride + block];
  return {id, static_cast<int32_t>(position), block_id * p.block_size + place % block_size};
}

__global__ void __launch_bounds__(kThreads) prepare_step_kernel(const __grid_constant__ PrepareStepParams p) {
  __shared__ int32_t shared_ends[kSharedEnds];
  wait_for_previous_kernel();
  const auto num_rows = static_cast<int32_t>(p.num_seqs);
  const int32_t* ends = p.query_start + 1;
  if (num_rows <= kSharedEnds) {
    for (int32_t i = threadIdx.x; i < num_rows; i += kThreads) shared_ends[i] = ends[i];
    __syncthreads();
    ends = shared_ends;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (token >= p.num_tokens) return;
  const int32_t row = find_row(ends, num_rows, token);
  const PreparedToken prepared = row < num_rows ? prepare_token(p, row, token) : PreparedToken{};
  p.token_ids[token] = prepared.id;
  p.positions[token] = prepared.position;
  p.slot_mapping[token] = prepared.slot;
}

__global__ void __launch_bounds__(kThreads) scatter_kernel(const __grid_constant__ ScatterParams p) {
  wait_for_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_values) return;
  const int64_t index = p.indices[i];
  const auto value = static_cast<int32_t>(index_at(p.values, p.values_are_int64, i));
  if (index < 0 || !is_usable_index("indices", index, p.target_size, kNoSkipMark)) return;
  p.target[index] = value;
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int pagemill_cuda_prepare_step(const PrepareStepParams* params, void* stream) {
  const PrepareStepParams& p = *params;
  if (p.num_tokens == 0) return 0;
  if (p.num_tokens > INT32_MAX || p.num_seqs >= INT32_MAX || p.block_size < 1) {
    return cuda::fail("prepare_step: %lld tokens, %lld sequences and blocks of %d are not supported",
                      static_cast<long long>(p.num_tokens), static_cast<long long>(p.num_seqs), p.block_size);
  }
  const auto blocks = static_cast<unsigned>(cuda::divide_up<int64_t>(p.num_tokens, cuda::kThreads));
  return cuda::launch_overlapped("prepare_step", cuda::prepare_step_kernel, blocks, cuda::kThreads,
                                 static_cast<cudaStream_t>(stream), p);
}

int pagemill_cuda_scatter(const ScatterParams* params, void* stream) {
  const ScatterParams& p = *params;
  if (p.num_values == 0) return 0;
  const int64_t blocks = cuda::divide_up<int64_t>(p.num_values, cuda::kThreads);
  if (blocks > INT32_MAX) {
    return cuda::fail("scatter: %lld values are not supported", static_cast<long long>(p.num_values));
  }
  return cuda::launch_overlapped("scatter", cuda::scatter_kernel, static_cast<unsigned>(blocks), cuda::kThreads,
                                 static_cast<cudaStream_t>(stream), p);
}
}
