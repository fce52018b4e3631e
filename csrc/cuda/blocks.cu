// Copies of whole cache blocks: inside the caches, and to or from pinned host memory.
#include <algorithm>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;

// One launch's worth, small enough for kernel arguments (4 KB).
constexpr int kCachesPerLaunch = 128;
constexpr int kCopiesPerLaunch = 128;
struct CopyList {
  void* caches[kCachesPerLaunch];
  int64_t sources[kCopiesPerLaunch], destinations[kCopiesPerLaunch];
  int64_t block_bytes;
};
static_assert(sizeof(CopyList) < 4000);

template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const __grid_constant__ CopyList list) {
  wait_for_previous_kernel();
  char* cache = static_cast<char*>(list.caches[blockIdx.z]);
  const auto* source = reinterpret_cast<const Unit*>(cache + list.sources[blockIdx.y] * list.block_bytes);
  auto* target = reinterpret_cast<Unit*>(cache + list.destinations[blockIdx.y] * list.block_bytes);
  const int64_t units = list.block_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < units; i += kUnitsPerThread * step) {
    Unit in_flight[kUnitsPerThread];
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      if (i + j * step < units) in_flight[j] = source[i + j * step];
    }
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      if (i + j * step < units) target[i + j * step] = in_flight[j];
    }
  }
}

// Copies of one launch run at the same time, so none may touch what another writes.
bool is_independent(const CopyList& list, int count, int64_t source, int64_t destination) {
  for (int i = 0; i < count; ++i) {
    if (list.destinations[i] == source || list.destinations[i] == destination || list.sources[i] == destination) {
      return false;
    }
  }
  return true;
}

int launch_copies(CopyList& list, int count, const CopyBlocksParams& p, cudaStream_t stream) {
  for (int64_t first = 0; first < p.num_caches; first += kCachesPerLaunch) {
    const auto caches = static_cast<int>(std::min<int64_t>(kCachesPerLaunch, p.num_caches - first));
    bool is_wide = p.block_bytes % kAccessBytes == 0;
    for (int i = 0; i < caches; ++i) {
      list.caches[i] = p.caches[first + i];
      is_wide = is_wide && is_aligned(list.caches[i], kAccessBytes);
    }
    const int64_t units = is_wide ? p.block_bytes / kAccessBytes : p.block_bytes;
    const auto parts =
        static_cast<unsigned>(std::clamp<int64_t>(divide_up<int64_t>(units, kThreads * kUnitsPerThread), 1, 64));
    const dim3 grid(parts, static_cast<unsigned>(count), static_cast<unsigned>(caches));
    auto* kernel = is_wide ? copy_blocks_kernel<uint4> : copy_blocks_kernel<uint8_t>;
    if (const int error = launch_overlapped("copy_blocks", kernel, grid, kThreads, stream, list)) return error;
  }
  return 0;
}

int check_block_ids(const char* operation, const char* name, const int64_t* ids, int64_t count, int64_t num_blocks) {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= num_blocks) {
      return fail("%s: %s[%lld] is %lld, outside the cache's %lld blocks", operation, name, static_cast<long long>(i),
                  static_cast<long long>(ids[i]), static_cast<long long>(num_blocks));
    }
  }
  return 0;
}

// Copies i, i + 1, .. that are neighbours on both sides move together.
int64_t run_length(const SwapBlocksParams& p, int64_t first) {
  int64_t length = 1;
  while (first + length < p.num_copies && p.blocks[first + length] == p.blocks[first] + length &&
         p.host_blocks[first + length] == p.host_blocks[first] + length) {
    ++length;
  }
  return length;
}

int check_pinned(const SwapBlocksParams& p) {
  for (int64_t i = 0; i < p.num_caches; ++i) {
    cudaPointerAttributes attributes;
    if (const int error = check_cuda("swap_blocks", cudaPointerGetAttributes(&attributes, p.host_caches[i]))) {
      return error;
    }
    if (attributes.type != cudaMemoryTypeHost) {
      return fail("swap_blocks: host_caches[%lld] is not pinned host memory; supported: pinned host memory",
                  static_cast<long long>(i));
    }
  }
  return 0;
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int pagemill_cuda_copy_blocks(const CopyBlocksParams* params, void* stream) {
  const CopyBlocksParams& p = *params;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  for (const int64_t* ids : {p.sources, p.destinations}) {
    const char* name = ids == p.sources ? "sources" : "destinations";
    if (const int error = cuda::check_block_ids("copy_blocks", name, ids, p.num_copies, p.num_blocks)) return error;
  }
  cuda::CopyList list;
  list.block_bytes = p.block_bytes;
  int count = 0;
  for (int64_t i = 0; i < p.num_copies; ++i) {
    if (p.sources[i] == p.destinations[i]) continue;
    if (count == cuda::kCopiesPerLaunch || !cuda::is_independent(list, count, p.sources[i], p.destinations[i])) {
      if (const int error = cuda::launch_copies(list, count, p, cuda_stream)) return error;
      count = 0;
    }
    list.sources[count] = p.sources[i];
    list.destinations[count++] = p.destinations[i];
  }
  return count > 0 ? cuda::launch_copies(list, count, p, cuda_stream) : 0;
}

int pagemill_cuda_swap_blocks(const SwapBlocksParams* params, void* stream) {
  const SwapBlocksParams& p = *params;
  if (const int error = cuda::check_block_ids("swap_blocks", "blocks", p.blocks, p.num_copies, p.num_blocks)) {
    return error;
  }
  if (const int error =
          cuda::check_block_ids("swap_blocks", "host_blocks", p.host_blocks, p.num_copies, p.num_host_blocks)) {
    return error;
  }
  if (p.num_copies == 0) return 0;
  if (const int error = cuda::check_pinned(p)) return error;
  const bool to_host = p.direction == SwapDirection::kToHost;
  for (int64_t first = 0; first < p.num_copies;) {
    const int64_t length = cuda::run_length(p, first);
    for (int64_t cache = 0; cache < p.num_caches; ++cache) {
      char* device = static_cast<char*>(p.caches[cache]) + p.blocks[first] * p.block_bytes;
      char* host = static_cast<char*>(p.host_caches[cache]) + p.host_blocks[first] * p.block_bytes;
      const cudaError_t error =
          cudaMemcpyAsync(to_host ? host : device, to_host ? device : host, static_cast<size_t>(length * p.block_bytes),
                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream));
      if (const int status = cuda::check_cuda("swap_blocks", error)) return status;
    }
    first += length;
  }
  return 0;
}
}
