// The choice of tile and ring for a product and a device, and the launch.
#pragma once

#include <algorithm>

#include "error.h"
#include "kernel_setup.cuh"
#include "pagemill/cuda_kernels.h"
#include "skinny_linear.cuh"

namespace pagemill::cuda {

// Shared memory of a block: what sm_90 and sm_100 have, less 3 KB, and what every processor since sm_80 has.
constexpr int kLargeShared = 224 * 1024, kSmallShared = 99 * 1024;

template <typename T, bool kIsGated, int kRowTiles, int kColumnTiles>
using LargeRing = SkinnyTraits<T, kIsGated, kRowTiles, kColumnTiles, 8, kLargeShared>;
template <typename T, bool kIsGated, int kRowTiles, int kColumnTiles>
using SmallRing = SkinnyTraits<T, kIsGated, kRowTiles, kColumnTiles, 4, kSmallShared>;

struct SkinnyTiling {
  int num_blocks, num_tiles, tile_outputs;
};

// One block for each multiprocessor, with equal shares of the outputs and tiles of equal height: copies in flight are
// as many in the last tile as in the first.
inline SkinnyTiling tile_outputs_evenly(int num_outputs, int num_multiprocessors, int max_tile_outputs) {
  SkinnyTiling tiling;
  tiling.num_blocks = std::min(num_outputs, num_multiprocessors);
  const int share = (num_outputs + tiling.num_blocks - 1) / tiling.num_blocks;
  tiling.num_tiles = (share + max_tile_outputs - 1) / max_tile_outputs;
  tiling.tile_outputs = (share + tiling.num_tiles - 1) / tiling.num_tiles;
  return tiling;
}

template <class Traits>
int launch_skinny_kernel(const SkinnyLinearParams& p, const SkinnyTiling& tiling, cudaStream_t stream) {
  using T = typename Traits::Element;
  const KernelSetup& setup = kernel_setup<&skinny_linear_kernel<Traits>>(Traits::kThreads, Traits::kSharedBytes);
  if (setup.error != cudaSuccess) return check_cuda("skinny_linear", setup.error);
  SkinnyArguments<T> a;
  a.out = static_cast<T*>(p.out);
  a.x = static_cast<const T*>(p.x);
  a.weight = static_cast<const T*>(p.weight);
  a.out_stride = p.out_stride;
  a.x_stride = p.x_stride;
  a.num_rows = static_cast<int32_t>(p.num_rows);
  a.num_outputs = static_cast<int32_t>(p.num_outputs);
  a.num_inputs = static_cast<int32_t>(p.num_inputs);
  a.num_tiles = tiling.num_tiles;
  a.tile_outputs = tiling.tile_outputs;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tiling.num_blocks);
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = Traits::kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = setup.architecture >= 90 ? 1 : 0;
  return check_cuda("skinny_linear", cudaLaunchKernelEx(&config, skinny_linear_kernel<Traits>, a));
}

template <template <typename, bool, int, int> class Ring, typename T, int kColumnTiles>
int launch_skinny_ring(const SkinnyLinearParams& p, int num_multiprocessors, cudaStream_t stream) {
  const int num_outputs = static_cast<int>(p.num_outputs);
  if (p.is_gated) {
    using Traits = Ring<T, true, 2, kColumnTiles>;
    return launch_skinny_kernel<Traits>(p, tile_outputs_evenly(num_outputs, num_multiprocessors, Traits::kTileOutputs),
                                        stream);
  }
  using Traits = Ring<T, false, 2, kColumnTiles>;
  const SkinnyTiling tiling = tile_outputs_evenly(num_outputs, num_multiprocessors, Traits::kTileOutputs);
  if (tiling.tile_outputs <= 16) return launch_skinny_kernel<Ring<T, false, 1, kColumnTiles>>(p, tiling, stream);
  return launch_skinny_kernel<Traits>(p, tiling, stream);
}

template <typename T>
int launch_skinny_linear(const SkinnyLinearParams& p, const DeviceLimits& limits, cudaStream_t stream) {
  const int num_multiprocessors = limits.num_multiprocessors;
  const bool is_large = limits.shared_bytes_per_block >= kLargeShared, is_narrow = p.num_rows <= 8;
  if (is_large && is_narrow) return launch_skinny_ring<LargeRing, T, 1>(p, num_multiprocessors, stream);
  if (is_large) return launch_skinny_ring<LargeRing, T, 2>(p, num_multiprocessors, stream);
  if (is_narrow) return launch_skinny_ring<SmallRing, T, 1>(p, num_multiprocessors, stream);
  return launch_skinny_ring<SmallRing, T, 2>(p, num_multiprocessors, stream);
}

}  // namespace pagemill::cuda
