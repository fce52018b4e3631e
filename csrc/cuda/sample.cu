// Sampling and log-probabilities: a cluster of blocks to a row.
//
// The logits are read from device memory once, into the shared memory of the cluster; every further walk is over that
// copy. Where a row does not fit (no clusters, or a huge vocabulary), one block works on device memory.
//
// Rows whose token depends on few entries are drawn by two kernels before (sample_listed.cuh); the clusters are
// launched all the same, since the host does not know the rows' parameters, and find nothing to do.
#include <algorithm>
#include <mutex>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "sample_listed.cuh"

namespace pagemill::cuda {
namespace {

using sampling::BlockShared;
using sampling::Layout;
using sampling::ListedRows;
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
    sample_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ Layout layout,
                  const __grid_constant__ ListedRows listed) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x / cluster::size();
  if (listed.others != nullptr) {
    if (row >= *listed.num_others) return;
    row = listed.others[row];
  }
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

template <typename T>
__global__ void __launch_bounds__(sampling::kThreads, sizeof(T) == 4 ? 3 : 4)
    list_entries_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ ListedRows listed) {
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x == 0) *listed.num_others = 0;
  sampling::list_entries<T>(p, listed);
}

__global__ void __launch_bounds__(sampling::kThreads)
    draw_listed_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ ListedRows listed) {
  wait_for_previous_kernel();
  sampling::draw_listed(p, listed);
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

// Parts of the workspace, each at a multiple of 256 bytes.
struct WorkspaceParts {
  int64_t others, spans, candidates, slices, end;
};

int64_t num_spans(const SampleParams& p) {
  const int64_t pack = kAccessBytes / dtype_bytes(p.dtype);
  return divide_up(divide_up(p.vocab_size, pack), sampling::kSpanEntries / pack);
}

WorkspaceParts workspace_parts(const SampleParams& p, const Plan& plan) {
  constexpr int64_t kAlignment = 256;
  const auto after = [](int64_t begin, int64_t bytes) { return begin + divide_up(bytes, kAlignment) * kAlignment; };
  const int64_t all_spans = p.num_rows * num_spans(p);
  WorkspaceParts parts{};
  parts.others = after(0, sizeof(uint32_t));
  parts.spans = after(parts.others, p.num_rows * static_cast<int64_t>(sizeof(int32_t)));
  parts.candidates = after(parts.spans, all_spans * static_cast<int64_t>(sizeof(sampling::SpanResult)));
  parts.slices =
      after(parts.candidates, all_spans * sampling::kSpanCandidates * static_cast<int64_t>(sizeof(uint64_t)));
  // Rows that do not fit into shared memory need room for logits that are converted or adjusted; others need none.
  const int64_t slice_floats = plan.is_resident ? 0 : p.num_rows * plan.slice_length;
  parts.end = after(parts.slices, slice_floats * static_cast<int64_t>(sizeof(float)));
  return parts;
}

// Whether rows are looked at that need few entries. Without a top-k for any row those that are not greedy need all.
bool lists_rows(const SampleParams& p) {
  if (p.temperature != nullptr && p.top_k == nullptr) return false;
  const bool has_logprobs =
      p.out_logprobs != nullptr || p.out_ranks != nullptr || (p.out_top_ids != nullptr && p.num_top > 0);
  return !has_logprobs && num_spans(p) <= sampling::kMaxSpans && num_spans(p) * p.num_rows <= INT32_MAX;
}

// A kernel of sampling::kThreads threads that overlaps with the end of the one before.
template <typename... Parameters, typename... Arguments>
int launch(const char* operation, void (*kernel)(Parameters...), int64_t num_blocks, int64_t cluster_blocks,
           int64_t slice_bytes, cudaStream_t stream, const Arguments&... arguments) {
  const DeviceLimits* device = device_limits();
  if (device == nullptr) return 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(sampling::kThreads);
  config.dynamicSmemBytes = sizeof(BlockShared) + static_cast<size_t>(slice_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  config.attrs = attributes;
  config.numAttrs = device->compute_capability >= 90 ? (cluster_blocks > 1 ? 2 : 1) : 0;
  return check_cuda(operation, cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <auto kResident, auto kInMemory, typename Params, typename... Arguments>
int launch_clusters(const char* operation, const Params& p, const Plan& plan, void* slices, cudaStream_t stream,
                    const Arguments&... arguments) {
  const bool uses_workspace = !plan.is_resident && (may_change(p) || !reads_in_place(p));
  if (uses_workspace && slices == nullptr) return fail("%s: workspace is null, but needed", operation);
  const Layout layout{static_cast<int32_t>(plan.slice_length), uses_workspace ? static_cast<float*>(slices) : nullptr};
  const int64_t slice_bytes = plan.is_resident ? plan.slice_length * static_cast<int64_t>(sizeof(float)) : 0;
  return launch(operation, plan.is_resident ? kResident : kInMemory, p.num_rows * plan.blocks_per_row,
                plan.blocks_per_row, slice_bytes, stream, p, layout, arguments...);
}

int launch_listed(const SampleParams& p, const ListedRows& listed, cudaStream_t stream) {
  const int64_t num_blocks = p.num_rows * listed.num_spans;
  const int error = with_element_type(p.dtype, [&](auto element) {
    return launch("sample", list_entries_kernel<decltype(element)>, num_blocks, 1, 0, stream, p, listed);
  });
  if (error != 0) return error;
  return launch("sample", draw_listed_kernel, p.num_rows, 1, 0, stream, p, listed);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int64_t pagemill_cuda_sample_workspace(const SampleParams* params) {
  const cuda::RowLimits* limits = cuda::row_limits<cuda::sample_kernel<true>>();
  if (limits == nullptr) return 0;
  return cuda::workspace_parts(*params, cuda::plan_rows(*params, *limits)).end;
}

int pagemill_cuda_sample(const SampleParams* params, void* workspace, void* stream) {
  const SampleParams& p = *params;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (const int error = cuda::check_rows("sample", p)) return error;
  const cuda::RowLimits* limits = cuda::row_limits<cuda::sample_kernel<true>>();
  if (limits == nullptr) return 1;
  if (p.num_rows == 0) return 0;
  if (workspace == nullptr) return cuda::fail("sample: workspace is null");
  const cuda::Plan plan = cuda::plan_rows(p, *limits);
  const cuda::WorkspaceParts parts = cuda::workspace_parts(p, plan);
  char* base = static_cast<char*>(workspace);
  cuda::ListedRows listed{};
  if (cuda::lists_rows(p)) {
    listed = {reinterpret_cast<uint32_t*>(base), reinterpret_cast<int32_t*>(base + parts.others),
              reinterpret_cast<cuda::sampling::SpanResult*>(base + parts.spans),
              reinterpret_cast<uint64_t*>(base + parts.candidates), static_cast<int32_t>(cuda::num_spans(p))};
    if (const int error = cuda::launch_listed(p, listed, cuda_stream)) return error;
  }
  return cuda::launch_clusters<cuda::sample_kernel<true>, cuda::sample_kernel<false>>(
      "sample", p, plan, base + parts.slices, cuda_stream, listed);
}

int pagemill_cuda_token_logprobs(const TokenLogprobsParams* params, void* workspace, void* stream) {
  const TokenLogprobsParams& p = *params;
  if (const int error = cuda::check_rows("token_logprobs", p)) return error;
  const cuda::RowLimits* limits = cuda::row_limits<cuda::token_logprobs_kernel<true>>();
  if (limits == nullptr) return 1;
  if (p.num_rows == 0) return 0;
  return cuda::launch_clusters<cuda::token_logprobs_kernel<true>, cuda::token_logprobs_kernel<false>>(
      "token_logprobs", p, cuda::plan_rows(p, *limits), workspace, static_cast<cudaStream_t>(stream));
}
}
