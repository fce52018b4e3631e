#include <algorithm>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "rows_common.cuh"

namespace pagemill::cuda {
namespace {

constexpr int kThreads = 128;

// Units of a thread, and threads of a block at most. Many rows: so many units to a thread that all are on their way at
// once.
template <int kUnits, int kBlockThreads>
struct Shape {
  static constexpr int kUnitsPerThread = kUnits, kMaxThreads = kBlockThreads;
};
using FewRows = Shape<4, kThreads>;
using ManyRows = Shape<8, 64>;

struct CopyBits {
  template <typename Unit>
  __device__ Unit operator()(const Unit& unit) const {
    return unit;
  }
};

struct Widen {
  template <typename T, int kCount>
  __device__ Pack<float, kCount> operator()(const Pack<T, kCount>& pack) const {
    return to_pack<float>(to_floats(pack));
  }
};

// A block moves part of a row, in units of In, which become units of Out.
template <typename In, typename Out, typename Convert, int kUnitsPerThread>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherRowsParams p, uint32_t blocks_per_row) {
  wait_for_previous_kernel();
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t block = blockIdx.x - row * blocks_per_row;
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(In));
  const int64_t id = index_at(p.ids, p.ids_are_int64, row);
  if (!is_usable_index("ids", id, p.num_table_rows, kNoSkipMark)) return;
  const In* source = reinterpret_cast<const In*>(static_cast<const char*>(p.table) + id * p.table_stride_bytes);
  Out* out = reinterpret_cast<Out*>(static_cast<char*>(p.out) + row * p.out_stride_bytes);
  const int64_t first = block * blockDim.x * kUnitsPerThread + threadIdx.x;
  In units_in_flight[kUnitsPerThread];
#pragma unroll
  for (int j = 0; j < kUnitsPerThread; ++j) {
    const int64_t i = first + j * blockDim.x;
    if (i < units) units_in_flight[j] = source[i];
  }
#pragma unroll
  for (int j = 0; j < kUnitsPerThread; ++j) {
    const int64_t i = first + j * blockDim.x;
    if (i < units) out[i] = Convert{}(units_in_flight[j]);
  }
}

template <typename In, typename Out, typename Convert, typename Shape = FewRows>
int launch_gather(const GatherRowsParams& p, cudaStream_t stream) {
  constexpr int kUnitsPerThread = Shape::kUnitsPerThread;
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(In));
  const int64_t wanted = divide_up<int64_t>(divide_up<int64_t>(units, kUnitsPerThread), kWarpLanes) * kWarpLanes;
  const auto threads = static_cast<unsigned>(std::min<int64_t>(wanted, Shape::kMaxThreads));
  const int64_t blocks_per_row = divide_up<int64_t>(units, threads * kUnitsPerThread);
  const int64_t blocks = blocks_per_row * p.num_rows;
  if (blocks > INT32_MAX) {
    return fail("gather_rows: %lld rows of %lld bytes are not supported; supported: up to %d blocks",
                static_cast<long long>(p.num_rows), static_cast<long long>(p.row_bytes), INT32_MAX);
  }
  return launch_overlapped("gather_rows", gather_kernel<In, Out, Convert, kUnitsPerThread>,
                           static_cast<unsigned>(blocks), threads, stream, p, static_cast<uint32_t>(blocks_per_row));
}

bool allows_units(const GatherRowsParams& p, int64_t in_bytes, int64_t out_bytes) {
  return p.row_bytes % in_bytes == 0 && p.table_stride_bytes % in_bytes == 0 && p.out_stride_bytes % out_bytes == 0 &&
         is_aligned(p.table, in_bytes) && is_aligned(p.out, out_bytes);
}

int gather_bits(const GatherRowsParams& p, cudaStream_t stream) {
  if (allows_units(p, 16, 16)) {
    constexpr int64_t kManyBytes = 32 << 20;
    return p.num_rows * p.row_bytes >= kManyBytes ? launch_gather<uint4, uint4, CopyBits, ManyRows>(p, stream)
                                                  : launch_gather<uint4, uint4, CopyBits>(p, stream);
  }
  if (allows_units(p, 4, 4)) return launch_gather<uint32_t, uint32_t, CopyBits>(p, stream);
  if (allows_units(p, 2, 2)) return launch_gather<uint16_t, uint16_t, CopyBits>(p, stream);
  return launch_gather<uint8_t, uint8_t, CopyBits>(p, stream);
}

template <typename T>
int gather_widening(const GatherRowsParams& p, cudaStream_t stream) {
  // Four numbers: the write is the wider side, and a warp's writes are then one stretch.
  constexpr int kCount = 4;
  if (allows_units(p, kCount * sizeof(T), kCount * sizeof(float))) {
    return launch_gather<Pack<T, kCount>, Pack<float, kCount>, Widen>(p, stream);
  }
  return launch_gather<Pack<T, 1>, Pack<float, 1>, Widen>(p, stream);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" int pagemill_cuda_gather_rows(const pagemill::GatherRowsParams* params, void* stream) {
  using namespace pagemill;
  const GatherRowsParams& p = *params;
  if (p.num_rows == 0 || p.row_bytes == 0) return 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!p.is_widening || p.dtype == DType::kFloat32) return cuda::gather_bits(p, cuda_stream);
  return p.dtype == DType::kBFloat16 ? cuda::gather_widening<cuda::BFloat16>(p, cuda_stream)
                                     : cuda::gather_widening<cuda::Float16>(p, cuda_stream);
}
