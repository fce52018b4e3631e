// What each instruction set provides for linear.cpp. A kernel works on one chunk and starts no threads.
#pragma once

#include <cstdint>

#include "pagemill/linear.h"

namespace pagemill {

// Weight rows that are packed and streamed together: two AVX-512 registers, two AMX tiles.
constexpr int64_t kBlockColumns = 32;
// Rows of x that a kernel takes together at most. Chunks begin at multiples of it.
constexpr int64_t kPanelRows = 32;
// Most rows of a chunk.
constexpr int64_t kMaxChunkRows = 512;

enum class BlockLayout {
  kColumns,  // [depth][32]
  kPairs,    // [depth / 2][32][2], as dot products of bf16 pairs take it; depth padded with zeros
};

struct LinearTask {
  const void* x;     // the caller's rows, or what pack_x wrote
  int64_t x_stride;  // elements between the caller's rows
  int64_t num_rows;
  int64_t in_features;
  const std::byte* blocks;
  int64_t block_bytes;
  const float* bias;  // [num_blocks * 32] or null
  void* out;
  int64_t out_stride, out_features;
  DType out_dtype;
  LinearEpilogue epilogue;
};

struct LinearKernels {
  BlockLayout layout;
  int64_t depth_multiple;
  // Scratch that pack_x fills; 0: the kernel reads the caller's rows as they are.
  int64_t (*x_scratch_bytes)(int64_t num_rows, int64_t in_features);
  void (*pack_x)(const LinearTask& task, void* scratch, int64_t first_row, int64_t last_row);
  void (*compute)(const LinearTask& task, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row);
};

const LinearKernels& linear_kernels_portable(DType dtype);
const LinearKernels& linear_kernels_avx2(DType dtype);
const LinearKernels& linear_kernels_avx512(DType dtype);
const LinearKernels& linear_kernels_avx512bf16();
const LinearKernels& linear_kernels_amx();

double peak_avx512bf16();
double peak_amx();

}  // namespace pagemill
