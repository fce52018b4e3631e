// From float32 sums to output rows. Compiled once per instruction set (see simd.h for why all is internal).
#pragma once

#include "linear_kernels.h"
#include "simd.h"

namespace pagemill {
namespace {

template <typename T>
PAGEMILL_INLINE void store_columns(T* out, int64_t count, VecF value) {
  if (count >= VecF::kWidth) {
    store(out, value);
  } else if (count > 0) {
    store_first(out, count, value);
  }
}

PAGEMILL_INLINE VecF silu(VecF x) { return x / (set1(1.0f) + exp(zero() - x)); }

// sums: [num_rows][32], of the rows from first_row and the columns of `block`.
template <typename T>
void finish_rows(const LinearTask& task, const float* sums, int64_t block, int64_t first_row, int64_t num_rows) {
  constexpr int64_t kHalf = kBlockColumns / 2;
  const float* bias = task.bias == nullptr ? nullptr : task.bias + block * kBlockColumns;
  const bool gated = task.epilogue == LinearEpilogue::kSiluMul;
  const int64_t first_column = block * (gated ? kHalf : kBlockColumns);
  const int64_t num_columns = task.out_features - first_column;
  for (int64_t row = 0; row < num_rows; ++row, sums += kBlockColumns) {
    T* out = static_cast<T*>(task.out) + (first_row + row) * task.out_stride + first_column;
    for (int64_t column = 0; column < (gated ? kHalf : kBlockColumns); column += VecF::kWidth) {
      VecF value = load(sums + column);
      if (bias != nullptr) value = value + load(bias + column);
      if (gated) {
        VecF up = load(sums + kHalf + column);
        if (bias != nullptr) up = up + load(bias + kHalf + column);
        value = silu(value) * up;
      } else if (task.epilogue == LinearEpilogue::kAccumulate) {
        const int64_t count = num_columns - column;
        value = value + (count >= VecF::kWidth ? load(out + column) : load_first(out + column, count));
      }
      store_columns(out + column, num_columns - column, value);
    }
  }
}

PAGEMILL_INLINE void finish(const LinearTask& task, const float* sums, int64_t block, int64_t first_row,
                            int64_t num_rows) {
  switch (task.out_dtype) {
    case DType::kFloat32:
      return finish_rows<float>(task, sums, block, first_row, num_rows);
    case DType::kBFloat16:
      return finish_rows<BFloat16>(task, sums, block, first_row, num_rows);
    case DType::kFloat16:
      return finish_rows<Float16>(task, sums, block, first_row, num_rows);
  }
}

}  // namespace
}  // namespace pagemill
