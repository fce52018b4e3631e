// Matrix products with packed weights on CPU: out = x · Wᵀ (+ bias), accumulated in float32.
//
// A result depends on the row of x, the weights, the dtype and the instruction set alone: neither on the number of
// threads nor on which other rows share the call, since every row count runs the same sums in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "pagemill/cpu_features.h"
#include "pagemill/params.h"

namespace pagemill {

struct LinearKernels;

// Rows of contiguous elements; the stride between rows counts elements.
struct MatrixView {
  void* data;
  int64_t num_rows, num_columns, row_stride;
  DType dtype;
};
struct ConstMatrixView {
  const void* data;
  int64_t num_rows, num_columns, row_stride;
  DType dtype;
};

enum class LinearEpilogue : int32_t {
  kStore = 0,       // out = x · Wᵀ + bias
  kAccumulate = 1,  // out += x · Wᵀ + bias, added in float32 and rounded once
  kSiluMul = 2,     // out = silu(gate) * up; kGateUp weights only, and always for them
};

enum class WeightOrder : int32_t {
  kRows = 0,    // output column n is weight row n
  kGateUp = 1,  // weight rows are I gates, then I ups: one output column takes a gate and an up
};

// A weight matrix in the layout that the kernels of one instruction set stream. Immutable, usable from any thread.
class PackedLinear {
 public:
  // weight: [out_features, in_features] (kGateUp: [2 * out_features, in_features]); bias: one float32 for each weight
  // row, or null. Neither is kept. Throws std::invalid_argument for shapes that do not fit.
  PackedLinear(const ConstMatrixView& weight, const float* bias, WeightOrder order, CpuIsa isa);

  int64_t in_features() const { return in_features_; }
  int64_t out_features() const { return out_features_; }
  DType dtype() const { return dtype_; }
  CpuIsa isa() const { return isa_; }
  int64_t num_bytes() const { return num_blocks_ * block_bytes_; }

  // x: [T, in_features] of dtype(); out: [T, out_features] of dtype() or float32, not overlapping x. Throws
  // std::invalid_argument when they do not fit.
  void apply(const ConstMatrixView& x, const MatrixView& out, LinearEpilogue epilogue) const;

  // The weight as it was given, contiguous.
  void unpack(void* weight) const;

 private:
  struct FreeBytes {
    void operator()(std::byte* bytes) const;
  };

  int64_t source_row(int64_t block, int64_t column) const;
  void check(const ConstMatrixView& x, const MatrixView& out, LinearEpilogue epilogue) const;

  const LinearKernels* kernels_;
  CpuIsa isa_;
  DType dtype_;
  WeightOrder order_;
  int64_t in_features_, out_features_, num_weight_rows_;
  int64_t num_blocks_, block_bytes_;
  std::unique_ptr<std::byte[], FreeBytes> blocks_;
  std::vector<float> bias_;  // in packed column order; empty: none
};

// Measured on this machine, for benchmarks: bytes per second that num_threads() threads read from a buffer of this
// size, and float operations per second of the bf16 product instruction (0 where there is none).
double probe_read_bandwidth(int64_t num_bytes, int repeats);
double probe_bf16_peak();

}  // namespace pagemill
