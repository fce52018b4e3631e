// Register-blocked products by fused multiply-add of float32, for every weight dtype: weights are widened as they are
// loaded, rows of x once before. Each sum runs over the depth in order in one accumulator.
#pragma once

#include <utility>

#include "linear_epilogue.h"

namespace pagemill {
namespace {

constexpr int kBlockVectors = static_cast<int>(kBlockColumns) / VecF::kWidth;

// As many rows as leave all accumulators in registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = 1;
#endif

// Weights arrive from memory when few rows share them; far enough ahead to cover its latency at full bandwidth.
constexpr int64_t kPrefetchBytes = 2048;

template <typename W, int kRows>
void fma_tile(const float* x, int64_t x_stride, const W* weights, int64_t depth, float* sums) {
  VecF acc[kRows][kBlockVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kBlockVectors; ++i) acc[row][i] = zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    const W* w = weights + k * kBlockColumns;
    if constexpr (kRows <= 4) {
      for (int64_t line = 0; line < kBlockColumns * static_cast<int64_t>(sizeof(W)); line += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + line);
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kBlockVectors; ++i) {
      const VecF column = load(w + i * VecF::kWidth);
#pragma GCC unroll 16
      for (int row = 0; row < kRows; ++row) acc[row][i] = fma(set1(x[row * x_stride + k]), column, acc[row][i]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int i = 0; i < kBlockVectors; ++i) store(sums + row * kBlockColumns + i * VecF::kWidth, acc[row][i]);
  }
}

template <typename W>
using FmaTile = void (*)(const float*, int64_t, const W*, int64_t, float*);

template <typename W, int... kIndices>
constexpr FmaTile<W> select_fma_tile(int64_t num_rows, std::integer_sequence<int, kIndices...>) {
  constexpr FmaTile<W> kTiles[] = {fma_tile<W, kIndices + 1>...};
  return kTiles[num_rows - 1];
}

template <typename W>
void fma_compute(const LinearTask& task, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row) {
  alignas(64) float sums[kTileRows * kBlockColumns];
  for (int64_t block = first_block; block < last_block; ++block) {
    const W* weights = reinterpret_cast<const W*>(task.blocks + block * task.block_bytes);
    for (int64_t row = first_row; row < last_row; row += kTileRows) {
      const int64_t num_rows = last_row - row < kTileRows ? last_row - row : kTileRows;
      const FmaTile<W> tile = select_fma_tile<W>(num_rows, std::make_integer_sequence<int, kTileRows>{});
      tile(static_cast<const float*>(task.x) + row * task.x_stride, task.x_stride, weights, task.in_features, sums);
      finish(task, sums, block, row, num_rows);
    }
  }
}

template <typename T>
void widen_x(const LinearTask& task, void* scratch, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) {
    const T* from = static_cast<const T*>(task.x) + row * task.x_stride;
    float* to = static_cast<float*>(scratch) + row * task.in_features;
    int64_t k = 0;
    for (; k + VecF::kWidth <= task.in_features; k += VecF::kWidth) store(to + k, load(from + k));
    for (; k < task.in_features; ++k) to[k] = to_float(from[k]);
  }
}

const LinearKernels& fma_kernels(DType dtype) {
  constexpr auto kNoScratch = [](int64_t, int64_t) -> int64_t { return 0; };
  constexpr auto kFloatScratch = [](int64_t num_rows, int64_t in_features) -> int64_t {
    return num_rows * in_features * 4;
  };
  static constexpr LinearKernels kFloat32 = {BlockLayout::kColumns, 1, kNoScratch, nullptr, fma_compute<float>};
  static constexpr LinearKernels kBFloat16 = {BlockLayout::kColumns, 1, kFloatScratch, widen_x<BFloat16>,
                                              fma_compute<BFloat16>};
  static constexpr LinearKernels kFloat16 = {BlockLayout::kColumns, 1, kFloatScratch, widen_x<Float16>,
                                             fma_compute<Float16>};
  switch (dtype) {
    case DType::kFloat32:
      return kFloat32;
    case DType::kBFloat16:
      return kBFloat16;
    case DType::kFloat16:
      break;
  }
  return kFloat16;
}

}  // namespace
}  // namespace pagemill
