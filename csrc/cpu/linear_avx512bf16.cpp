// bf16 products by VDPBF16PS: 16 columns x one pair of depth per instruction.
#include <immintrin.h>

#include <chrono>
#include <utility>

#include "linear_epilogue.h"

namespace pagemill {
namespace {

constexpr int kTileRows = 12;
constexpr int64_t kPrefetchBytes = 4096;

int64_t padded_depth(int64_t in_features) { return (in_features + 1) / 2 * 2; }

PAGEMILL_INLINE __m512bh broadcast_pair(const uint16_t* x) {
  int32_t pair;
  __builtin_memcpy(&pair, x, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

template <int kRows>
void pair_tile(const uint16_t* x, int64_t x_stride, const uint16_t* weights, int64_t depth, float* sums) {
  __m512 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
  for (int64_t k = 0; k < depth; k += 2) {
    const uint16_t* w = weights + k * kBlockColumns;
    if constexpr (kRows <= 6) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + 64, _MM_HINT_T0);
    }
    const __m512bh left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
    const __m512bh right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + 32));
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const __m512bh pair = broadcast_pair(x + row * x_stride + k);
      acc[row][0] = _mm512_dpbf16_ps(acc[row][0], pair, left);
      acc[row][1] = _mm512_dpbf16_ps(acc[row][1], pair, right);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(sums + row * kBlockColumns, acc[row][0]);
    _mm512_store_ps(sums + row * kBlockColumns + 16, acc[row][1]);
  }
}

using PairTile = void (*)(const uint16_t*, int64_t, const uint16_t*, int64_t, float*);

template <int... kIndices>
PairTile select_pair_tile(int64_t num_rows, std::integer_sequence<int, kIndices...>) {
  static constexpr PairTile kTiles[] = {pair_tile<kIndices + 1>...};
  return kTiles[num_rows - 1];
}

void compute(const LinearTask& task, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row) {
  alignas(64) float sums[kTileRows * kBlockColumns];
  const int64_t depth = padded_depth(task.in_features);
  for (int64_t block = first_block; block < last_block; ++block) {
    const uint16_t* weights = reinterpret_cast<const uint16_t*>(task.blocks + block * task.block_bytes);
    for (int64_t row = first_row; row < last_row; row += kTileRows) {
      const int64_t num_rows = last_row - row < kTileRows ? last_row - row : kTileRows;
      const PairTile tile = select_pair_tile(num_rows, std::make_integer_sequence<int, kTileRows>{});
      tile(static_cast<const uint16_t*>(task.x) + row * task.x_stride, task.x_stride, weights, depth, sums);
      finish(task, sums, block, row, num_rows);
    }
  }
}

// Only an odd depth needs a copy: its last pair would reach beyond the row.
int64_t x_scratch_bytes(int64_t num_rows, int64_t in_features) {
  return in_features % 2 == 0 ? 0 : num_rows * padded_depth(in_features) * 2;
}

void pad_x(const LinearTask& task, void* scratch, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    uint16_t* to = static_cast<uint16_t*>(scratch) + row * padded_depth(task.in_features);
    __builtin_memcpy(to, static_cast<const uint16_t*>(task.x) + row * task.x_stride,
                     static_cast<size_t>(task.in_features) * 2);
    to[task.in_features] = 0;
  }
}

}  // namespace

const LinearKernels& linear_kernels_avx512bf16() {
  static constexpr LinearKernels kKernels = {BlockLayout::kPairs, 2, x_scratch_bytes, pad_x, compute};
  return kKernels;
}

double peak_avx512bf16() {
  constexpr int64_t kDepth = 512;
  constexpr int kRounds = 2000;
  alignas(64) static uint16_t x[kTileRows * kDepth], weights[kBlockColumns * kDepth];
  alignas(64) float sums[kTileRows * kBlockColumns];
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds; ++round) pair_tile<kTileRows>(x, kDepth, weights, kDepth, sums);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  return 2.0 * kTileRows * kBlockColumns * kDepth * kRounds / elapsed.count();
}

}  // namespace pagemill
