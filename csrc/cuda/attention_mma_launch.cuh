// Launches one instantiation of the mma prefill kernel.
#pragma once

#include "attention_mma.cuh"
#include "attention_mma_dispatch.h"
#include "kernel_setup.cuh"

namespace pagemill::cuda::mma {

// Tiles that any plan of so many tokens and sequences can have: what is launched must serve every plan that a captured
// graph may be replayed with.
inline int64_t max_prefill_tiles(const PagedAttentionParams& p) {
  return std::min(p.num_tokens, p.num_tokens / kPrefillTileQueries + p.num_seqs);
}

template <typename Tile, typename T, bool kIs8Bit>
int launch_tiling(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  constexpr auto kKernel = prefill_mma_kernel<Tile, T, kIs8Bit>;
  constexpr int kSharedBytes = Tile::template shared_bytes<kIs8Bit>();
  const KernelSetup& setup = kernel_setup<kKernel>(Tile::kThreads, kSharedBytes);
  if (setup.error != cudaSuccess) return check_cuda("paged_attention (mma prefill)", setup.error);
  const int64_t items = max_prefill_tiles(p) * p.num_query_heads;
  const int grid = static_cast<int>(std::min<int64_t>(items, setup.resident_blocks));
  kKernel<<<grid, Tile::kThreads, kSharedBytes, stream>>>(p, launch.plan);
  return check_cuda("paged_attention (mma prefill)", cudaGetLastError());
}

// What was measured to be best where it could be (sm_90), and elsewhere what fits twice into a multiprocessor, or fills
// one with eight warps.
template <int kHeadSize, Chip kChip>
struct TilingOf {
  using Type = Tiling<kHeadSize, 8, 1, (kHeadSize <= 192 ? 64 : 32), 1>;
};
template <int kHeadSize, Chip kChip>
  requires(kHeadSize <= 128)
struct TilingOf<kHeadSize, kChip> {
  static constexpr int kChips = static_cast<int>(kChip);
  using Type = std::conditional_t<kChip == Chip::kSmall, Tiling<kHeadSize, 8, 1, 64, 1, kChips>,
                                  Tiling<kHeadSize, 4, 2, (kChip == Chip::kLarge ? 64 : 32), 2, kChips>>;
};

template <int kHeadSize, typename T, Chip kChip>
int launch_on(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  using Tile = typename TilingOf<kHeadSize, kChip>::Type;
  return p.kv_dtype == KvDType::kActivation ? launch_tiling<Tile, T, false>(p, launch, stream)
                                            : launch_tiling<Tile, T, true>(p, launch, stream);
}

// The code that is loaded decides, not the device: code of sm_80 also runs on sm_86.
template <int kHeadSize, typename T>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  using Tile = typename TilingOf<kHeadSize, Chip::kSmall>::Type;
  const KernelSetup& setup =
      kernel_setup<prefill_mma_kernel<Tile, T, false>>(Tile::kThreads, Tile::template shared_bytes<false>());
  if (setup.error != cudaSuccess) return check_cuda("paged_attention (mma prefill)", setup.error);
  switch (chip_of(setup.architecture)) {
    case Chip::kLarge:
      return launch_on<kHeadSize, T, Chip::kLarge>(p, launch, stream);
    case Chip::kMedium:
      return launch_on<kHeadSize, T, Chip::kMedium>(p, launch, stream);
    default:
      return launch_on<kHeadSize, T, Chip::kSmall>(p, launch, stream);
  }
}

}  // namespace pagemill::cuda::mma
