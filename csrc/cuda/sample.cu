// Sampling and log-probabilities: one launch, a cluster of blocks to a row.
//
// The logits are read from device memory once, into the shared memory of the cluster; every further walk is over that
// copy. Where a row does not fit (no clusters, or a huge vocabulary), one block works on device memory.
#include <algorithm>
#include <mutex>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "sample_row.cuh"

namespace pagemill::cuda {
namespace {

using sampling::BlockShared;
using sampling::Layout;
using sampling::RawRow;
using sampling::RowSampler;

template <typename Params>
__device__ __forceinline__ RawRow raw_row(const Params& p, int64_t row) {
  const int64_t element_bytes = p.dtype == DType::kFloat32 ? 4 : 2;
  const char* logits = static_cast<const char*>(p.logits) + row * p.logits_stride * element_bytes;
  return {logits, p.dtype, static_cast<int32_t>(p.vocab_size)};
}

template <bool kResident>
__global__ void __launch_bounds__(sampling::kThreads, sampling::kBlocksPerMultiprocessor)
    sample_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ Layout layout) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / cluster::size();
  RowSampler<kResident> sampler(raw_row(p, row), layout, row);
  sampler.sample(p);
}

template <bool kResident>
__global__ void __launch_bounds__(sampling::kThreads, sampling::kBlocksPerMultiprocessor)
    token_logprobs_kernel(const __grid_constant__ TokenLogprobsParams p, const __grid_constant__ Layout layout) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / cluster::size();
  RowSampler<kResident> sampler(raw_row(p, row), layout, row);
  sampler.logprobs_of(p);
}

constexpr int kMaxClusterBlocks = 16;
// Slices up to this size leave room for three blocks on a multiprocessor: some load while others compute.
constexpr int64_t kComfortableSliceBytes = 65536;
constexpr int64_t kReservedSharedBytes = 1024;  // by the system, of each block

// What a device allows: asked once, before the first launch there.
struct RowLimits {
  cudaError_t error;
  int64_t max_cluster_blocks, max_slice_bytes, num_multiprocessors;
};

template <auto kResident>
RowLimits ask_row_limits(const DeviceLimits& device) {
  RowLimits limits{cudaSuccess, 1, 0, device.num_multiprocessors};
  limits.max_slice_bytes =
      device.shared_bytes_per_block - static_cast<int64_t>(sizeof(BlockShared)) - kReservedSharedBytes;
  limits.error = cudaFuncSetAttribute(kResident, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(sizeof(BlockShared) + limits.max_slice_bytes));
  if (limits.error != cudaSuccess || device.compute_capability < 90) return limits;
  limits.error = cudaFuncSetAttribute(kResident, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (limits.error != cudaSuccess) return limits;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kMaxClusterBlocks);
  config.blockDim = dim3(sampling::kThreads);
  config.dynamicSmemBytes = sizeof(BlockShared) + static_cast<size_t>(limits.max_slice_bytes);
  int blocks = 1;
  limits.error = cudaOccupancyMaxPotentialClusterSize(&blocks, kResident, &config);
  while (limits.max_cluster_blocks * 2 <= std::min(blocks, kMaxClusterBlocks)) limits.max_cluster_blocks *= 2;
  return limits;
}

// Of the current device; null with fail() where there is none.
template <auto kResident>
const RowLimits* row_limits() {
  constexpr int kMaxDevices = 64;
  static RowLimits limits[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  const DeviceLimits* device = device_limits();
  if (device == nullptr) return nullptr;
  int index = 0;
  cudaGetDevice(&index);
  std::call_once(asked[index], [&] { limits[index] = ask_row_limits<kResident>(*device); });
  return check_cuda("sample", limits[index].error) == 0 ? &limits[index] : nullptr;
}

struct Plan {
  bool is_resident;
  int64_t blocks_per_row, slice_length;
};

template <typename Params>
Plan plan_rows(const Params& p, const RowLimits& limits) {
  const auto slice_length = [&](int64_t blocks) { return divide_up<int64_t>(divide_up(p.vocab_size, blocks), 8) * 8; };
  const auto slice_bytes = [&](int64_t blocks) { return slice_length(blocks) * static_cast<int64_t>(sizeof(float)); };
  int64_t blocks = 1;
  while (blocks < limits.max_cluster_blocks && slice_bytes(blocks) > kComfortableSliceBytes) blocks *= 2;
  // Few rows: more blocks to each, as long as multiprocessors are idle.
  while (blocks < limits.max_cluster_blocks && p.num_rows * blocks * 2 <= limits.num_multiprocessors) blocks *= 2;
  if (slice_bytes(blocks) <= limits.max_slice_bytes) return {true, blocks, slice_length(blocks)};
  return {false, 1, slice_length(1)};
}

// Whether rows outside shared memory can be read where they are, with no room for converted or adjusted logits.
template <typename Params>
bool reads_in_place(const Params& p) {
  return p.dtype == DType::kFloat32 && p.vocab_size % sampling::kSlicePack == 0 &&
         p.logits_stride % sampling::kSlicePack == 0 && is_aligned(p.logits, kAccessBytes);
}
bool may_change(const SampleParams& p) {
  return p.presence_penalty != nullptr || p.frequency_penalty != nullptr || p.repetition_penalty != nullptr ||
         p.bias_offsets != nullptr || p.masked_offsets != nullptr;
}
bool may_change(const TokenLogprobsParams&) { return false; }

template <typename Params>
int check_rows(const char* operation, const Params& p) {
  if (p.vocab_size < 1 || p.vocab_size > INT32_MAX / 2) {
    return fail("%s: vocab_size %lld is not supported; supported: 1 to %d", operation,
                static_cast<long long>(p.vocab_size), INT32_MAX / 2);
  }
  if (p.num_rows > INT32_MAX / kMaxClusterBlocks) {
    return fail("%s: num_rows %lld is not supported", operation, static_cast<long long>(p.num_rows));
  }
  if (p.out_top_ids != nullptr && p.num_top > sampling::kMaxCandidates) {
    return fail("%s: num_top %d is not supported; supported: up to %d", operation, p.num_top, sampling::kMaxCandidates);
  }
  return 0;
}

template <auto kResident, auto kInMemory, typename Params>
int launch_rows(const char* operation, const Params& p, void* workspace, cudaStream_t stream) {
  if (const int error = check_rows(operation, p)) return error;
  const DeviceLimits* device = device_limits();
  const RowLimits* limits = row_limits<kResident>();
  if (device == nullptr || limits == nullptr) return 1;
  if (p.num_rows == 0) return 0;
  const Plan plan = plan_rows(p, *limits);
  const bool uses_workspace = !plan.is_resident && (may_change(p) || !reads_in_place(p));
  if (uses_workspace && workspace == nullptr) return fail("%s: workspace is null, but needed", operation);
  const Layout layout{static_cast<int32_t>(plan.slice_length),
                      uses_workspace ? static_cast<float*>(workspace) : nullptr};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.num_rows * plan.blocks_per_row));
  config.blockDim = dim3(sampling::kThreads);
  config.dynamicSmemBytes = sizeof(BlockShared) + (plan.is_resident ? plan.slice_length * sizeof(float) : 0);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(plan.blocks_per_row), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = device->compute_capability >= 90 ? 2 : 0;
  return check_cuda(operation, cudaLaunchKernelEx(&config, plan.is_resident ? kResident : kInMemory, p, layout));
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int64_t pagemill_cuda_sample_workspace(const SampleParams* params) {
  // Rows that do not fit into shared memory need room for logits that are converted or adjusted; others need none.
  constexpr int64_t kLeastBytes = 256;
  const cuda::RowLimits* limits = cuda::row_limits<cuda::sample_kernel<true>>();
  if (limits == nullptr) return 0;
  const cuda::Plan plan = cuda::plan_rows(*params, *limits);
  if (plan.is_resident) return kLeastBytes;
  return std::max(kLeastBytes, params->num_rows * plan.slice_length * static_cast<int64_t>(sizeof(float)));
}

int pagemill_cuda_sample(const SampleParams* params, void* workspace, void* stream) {
  return cuda::launch_rows<cuda::sample_kernel<true>, cuda::sample_kernel<false>>("sample", *params, workspace,
                                                                                  static_cast<cudaStream_t>(stream));
}

int pagemill_cuda_token_logprobs(const TokenLogprobsParams* params, void* workspace, void* stream) {
  return cuda::launch_rows<cuda::token_logprobs_kernel<true>, cuda::token_logprobs_kernel<false>>(
      "token_logprobs", *params, workspace, static_cast<cudaStream_t>(stream));
}
}
