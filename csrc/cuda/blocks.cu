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

// Swaps by a kernel: the copy engines take more than a microsecond for each block of each cache, however small. Few
// thread blocks are enough for the link, and leave the multiprocessors to other streams.
constexpr int kSwapThreads = 512;
constexpr int kSwapBlocks = 32;
constexpr int kCachesPerSwap = 96;
constexpr int kCopiesPerSwap = 128;
struct SwapList {
  const void* sources[kCachesPerSwap];
  void* targets[kCachesPerSwap];
  int64_t source_blocks[kCopiesPerSwap], target_blocks[kCopiesPerSwap];
  int64_t block_units;
  int32_t num_caches, num_copies;
};
static_assert(sizeof(SwapList) < 4000);

// Units of 16 bytes. A block of threads takes every gridDim-th part of all copies in a row.
__global__ void __launch_bounds__(kSwapThreads) swap_blocks_kernel(const __grid_constant__ SwapList list) {
  wait_for_previous_kernel();
  constexpr int64_t kPart = kSwapThreads * kUnitsPerThread;
  const int64_t parts_per_block = divide_up(list.block_units, kPart);
  const int64_t num_parts = parts_per_block * list.num_caches * list.num_copies;
  for (int64_t part = blockIdx.x; part < num_parts; part += gridDim.x) {
    const int64_t copy_in_all = part / parts_per_block;
    const auto cache = static_cast<int32_t>(copy_in_all / list.num_copies);
    const auto copy = static_cast<int32_t>(copy_in_all % list.num_copies);
    const auto* source = static_cast<const uint4*>(list.sources[cache]) + list.source_blocks[copy] * list.block_units;
    auto* target = static_cast<uint4*>(list.targets[cache]) + list.target_blocks[copy] * list.block_units;
    const int64_t first = part % parts_per_block * kPart + threadIdx.x;
    uint4 in_flight[kUnitsPerThread];
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      const int64_t i = first + j * kSwapThreads;
      if (i < list.block_units) in_flight[j] = source[i];
    }
#pragma unroll
    for (int j = 0; j < kUnitsPerThread; ++j) {
      const int64_t i = first + j * kSwapThreads;
      if (i < list.block_units) target[i] = in_flight[j];
    }
  }
}

// Where the device sees pinned host memory.
int find_device_address(void* host_cache, int64_t index, void** address) {
  cudaPointerAttributes attributes;
  if (const int error = check_cuda("swap_blocks", cudaPointerGetAttributes(&attributes, host_cache))) return error;
  if (attributes.type != cudaMemoryTypeHost) {
    return fail("swap_blocks: host_caches[%lld] is not pinned host memory; supported: pinned host memory",
                static_cast<long long>(index));
  }
  *address = attributes.devicePointer;
  return 0;
}

// One launch's caches: first .. first + num_caches - 1 of all. is_wide: whether they allow 16-byte units.
int find_swap_caches(const SwapBlocksParams& p, int64_t first, SwapList& list, bool& is_wide) {
  const bool to_host = p.direction == SwapDirection::kToHost;
  list.num_caches = static_cast<int32_t>(std::min<int64_t>(kCachesPerSwap, p.num_caches - first));
  is_wide = p.block_bytes % kAccessBytes == 0;
  for (int32_t i = 0; i < list.num_caches; ++i) {
    void* host_cache = nullptr;
    if (const int error = find_device_address(p.host_caches[first + i], first + i, &host_cache)) return error;
    list.sources[i] = to_host ? p.caches[first + i] : host_cache;
    list.targets[i] = to_host ? host_cache : p.caches[first + i];
    is_wide = is_wide && host_cache != nullptr && is_aligned(list.sources[i], kAccessBytes) &&
              is_aligned(list.targets[i], kAccessBytes);
  }
  return 0;
}

int launch_swaps(const SwapBlocksParams& p, SwapList& list, cudaStream_t stream) {
  const bool to_host = p.direction == SwapDirection::kToHost;
  list.block_units = p.block_bytes / kAccessBytes;
  for (int64_t first = 0; first < p.num_copies; first += kCopiesPerSwap) {
    list.num_copies = static_cast<int32_t>(std::min<int64_t>(kCopiesPerSwap, p.num_copies - first));
    for (int32_t i = 0; i < list.num_copies; ++i) {
      list.source_blocks[i] = to_host ? p.blocks[first + i] : p.host_blocks[first + i];
      list.target_blocks[i] = to_host ? p.host_blocks[first + i] : p.blocks[first + i];
    }
    if (const int error =
            launch_overlapped("swap_blocks", swap_blocks_kernel, kSwapBlocks, kSwapThreads, stream, list)) {
      return error;
    }
  }
  return 0;
}

// Blocks that are no multiple of 16 bytes.
int copy_one_by_one(const SwapBlocksParams& p, int64_t first_cache, int64_t num_caches, cudaStream_t stream) {
  const bool to_host = p.direction == SwapDirection::kToHost;
  for (int64_t cache = first_cache; cache < first_cache + num_caches; ++cache) {
    for (int64_t i = 0; i < p.num_copies; ++i) {
      char* device = static_cast<char*>(p.caches[cache]) + p.blocks[i] * p.block_bytes;
      char* host = static_cast<char*>(p.host_caches[cache]) + p.host_blocks[i] * p.block_bytes;
      const cudaError_t error =
          cudaMemcpyAsync(to_host ? host : device, to_host ? device : host, static_cast<size_t>(p.block_bytes),
                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream);
      if (const int status = check_cuda("swap_blocks", error)) return status;
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
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  cuda::SwapList list;
  for (int64_t first = 0; first < p.num_caches; first += cuda::kCachesPerSwap) {
    bool is_wide = false;
    if (const int error = cuda::find_swap_caches(p, first, list, is_wide)) return error;
    const int error = is_wide ? cuda::launch_swaps(p, list, cuda_stream)
                              : cuda::copy_one_by_one(p, first, list.num_caches, cuda_stream);
    if (error != 0) return error;
  }
  return 0;
}
}
