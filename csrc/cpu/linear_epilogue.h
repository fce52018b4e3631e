// From float32 sums to output rows. Compiled once per instruction set (see simd.h for why all is internal).
#pragma once

#include "linear_kernels.h"
#include "simd.h"

namespace pagemill {
namespace {

PAGEMILL_INLINE VecF silu(VecF x) { return x / (set1(1.0f) + exp(zero() - x)); }

// One vector of output columns from the sums of a row; `column` counts from the block's first.
template <LinearEpilogue kEpilogue>
PAGEMILL_INLINE VecF finished_vector(const float* sums, const float* bias, int64_t column) {
  constexpr int64_t kHalf = kBlockColumns / 2;
  VecF value = load(sums + column);
  if (bias != nullptr) value = value + load(bias + column);
  if constexpr (kEpilogue == LinearEpilogue::kSiluMul) {
    VecF up = load(sums + kHalf + column);
    if (bias != nullptr) up = up + load(bias + kHalf + column);
    value = silu(value) * up;
  }
  return value;
}

template <typename T, LinearEpilogue kEpilogue>
PAGEMILL_INLINE void finish_whole_row(const float* sums, const float* bias, T* out, int64_t num_columns) {
#pragma GCC unroll 8
  for (int64_t column = 0; column < num_columns; column += VecF::kWidth) {
    VecF value = finished_vector<kEpilogue>(sums, bias, column);
    if constexpr (kEpilogue == LinearEpilogue::kAccumulate) value = value + load(out + column);
    store(out + column, value);
  }
}

template <typename T, LinearEpilogue kEpilogue>
void finish_partial_row(const float* sums, const float* bias, T* out, int64_t num_columns) {
  for (int64_t column = 0; column < num_columns; column += VecF::kWidth) {
    const int64_t count = num_columns - column < VecF::kWidth ? num_columns - column : VecF::kWidth;
    VecF value = finished_vector<kEpilogue>(sums, bias, column);
    if constexpr (kEpilogue == LinearEpilogue::kAccumulate) value = value + load_first(out + column, count);
    store_first(out + column, count, value);
  }
}

// sums: [num_rows][32], of the rows from first_row and the columns of `block`.
template <typename T, LinearEpilogue kEpilogue>
void finish_rows(const LinearTask& task, const float* sums, int64_t block, int64_t first_row, int64_t num_rows) {
  constexpr int64_t kColumns = kEpilogue == LinearEpilogue::kSiluMul ? kBlockColumns / 2 : kBlockColumns;
  const float* bias = task.bias == nullptr ? nullptr : task.bias + block * kBlockColumns;
  const int64_t out_stride = task.out_stride;
  const int64_t num_columns = task.out_features - block * kColumns;
  T* out = static_cast<T*>(task.out) + first_row * out_stride + block * kColumns;
  for (int64_t row = 0; row < num_rows; ++row, sums += kBlockColumns, out += out_stride) {
    if (num_columns < kColumns) {
      finish_partial_row<T, kEpilogue>(sums, bias, out, num_columns);
    } else if (bias != nullptr) {
      finish_whole_row<T, kEpilogue>(sums, bias, out, kColumns);
    } else {
      finish_whole_row<T, kEpilogue>(sums, nullptr, out, kColumns);
    }
  }
}

template <typename T>
void finish_as(const LinearTask& task, const float* sums, int64_t block, int64_t first_row, int64_t num_rows) {
  switch (task.epilogue) {
    case LinearEpilogue::kStore:
      return finish_rows<T, LinearEpilogue::kStore>(task, sums, block, first_row, num_rows);
    case LinearEpilogue::kAccumulate:
      return finish_rows<T, LinearEpilogue::kAccumulate>(task, sums, block, first_row, num_rows);
    case LinearEpilogue::kSiluMul:
      return finish_rows<T, LinearEpilogue::kSiluMul>(task, sums, block, first_row, num_rows);
  }
}

inline void finish(const LinearTask& task, const float* sums, int64_t block, int64_t first_row, int64_t num_rows) {
  switch (task.out_dtype) {
    case DType::kFloat32:
      return finish_as<float>(task, sums, block, first_row, num_rows);
    case DType::kBFloat16:
      return finish_as<BFloat16>(task, sums, block, first_row, num_rows);
    case DType::kFloat16:
      return finish_as<Float16>(task, sums, block, first_row, num_rows);
  }
}

}  // namespace
}  // namespace pagemill
