#include "pagemill/linear.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "linear_kernels.h"
#include "pagemill/thread_pool.h"

namespace pagemill {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// A chunk streams about this much weight: enough to amortise the claim and the ramp of the prefetchers.
constexpr int64_t kChunkBytes = 192 << 10;
// Chunks per thread below which a late thread would cost more than smaller chunks do.
constexpr int64_t kMinChunksPerThread = 4;
// The rows of a chunk stay in the second-level cache while its blocks pass.
constexpr int64_t kChunkRowBytes = 768 << 10;
// Products below this many weight elements x rows take less time than waking a thread.
constexpr int64_t kMinParallelWork = 1 << 15;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return divide_up(a, b) * b; }

const LinearKernels& select_kernels(DType dtype, CpuIsa isa) {
#if defined(PAGEMILL_HAVE_AMX)
  if (dtype == DType::kBFloat16 && isa == CpuIsa::kAmx) return linear_kernels_amx();
#endif
#if defined(PAGEMILL_HAVE_AVX512BF16)
  if (dtype == DType::kBFloat16 && isa >= CpuIsa::kAvx512Bf16) return linear_kernels_avx512bf16();
#endif
#if defined(PAGEMILL_HAVE_AVX512)
  if (isa >= CpuIsa::kAvx512) return linear_kernels_avx512(dtype);
#endif
#if defined(PAGEMILL_HAVE_AVX2)
  if (isa >= CpuIsa::kAvx2) return linear_kernels_avx2(dtype);
#endif
  (void)isa;
  return linear_kernels_portable(dtype);
}

std::byte* allocate_zeroed(int64_t num_bytes) {
  // Huge pages: streaming through 4 KB pages costs a page walk every 64 cache lines.
  const int64_t alignment = num_bytes >= kHugePageBytes ? kHugePageBytes : 64;
  const int64_t size = round_up(std::max<int64_t>(num_bytes, 1), alignment);
  void* memory = aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(size));
  if (memory == nullptr) throw std::bad_alloc();
  if (alignment == kHugePageBytes) madvise(memory, static_cast<size_t>(size), MADV_HUGEPAGE);
  std::memset(memory, 0, static_cast<size_t>(size));
  return static_cast<std::byte*>(memory);
}

// Packed x of the calling thread; grows to the largest call and stays.
std::byte* x_scratch(int64_t num_bytes) {
  struct Scratch {
    std::byte* bytes = nullptr;
    int64_t size = 0;
    ~Scratch() { free(bytes); }
  };
  static thread_local Scratch scratch;
  if (scratch.size < num_bytes) {
    free(std::exchange(scratch.bytes, nullptr));
    scratch.size = 0;
    scratch.bytes = allocate_zeroed(num_bytes);
    scratch.size = num_bytes;
  }
  return scratch.bytes;
}

// Element index of (column, depth k) inside a block.
int64_t element_offset(BlockLayout layout, int64_t column, int64_t k) {
  if (layout == BlockLayout::kColumns) return k * kBlockColumns + column;
  return (k / 2) * kBlockColumns * 2 + column * 2 + k % 2;
}

template <typename Element>
void pack_column(BlockLayout layout, Element* block, int64_t column, const Element* row, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k) block[element_offset(layout, column, k)] = row[k];
}

template <typename Element>
void unpack_column(BlockLayout layout, const Element* block, int64_t column, Element* row, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k) row[k] = block[element_offset(layout, column, k)];
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

struct Partition {
  int64_t blocks_per_chunk, rows_per_chunk;
  int64_t num_block_chunks, num_row_chunks;
};

Partition partition(int64_t num_blocks, int64_t block_bytes, int64_t num_rows) {
  Partition result;
  const int64_t row_bytes = block_bytes / kBlockColumns;
  const int64_t cached_rows =
      std::clamp(kChunkRowBytes / row_bytes / kPanelRows * kPanelRows, 2 * kPanelRows, kMaxChunkRows);
  result.rows_per_chunk = std::min(cached_rows, round_up(num_rows, kPanelRows));
  result.num_row_chunks = divide_up(num_rows, result.rows_per_chunk);
  const int64_t wanted_chunks = divide_up(kMinChunksPerThread * num_threads(), result.num_row_chunks);
  const int64_t by_bytes = std::max<int64_t>(1, kChunkBytes / block_bytes);
  result.blocks_per_chunk = std::clamp<int64_t>(num_blocks / wanted_chunks, 1, by_bytes);
  result.num_block_chunks = divide_up(num_blocks, result.blocks_per_chunk);
  return result;
}

}  // namespace

void PackedLinear::FreeBytes::operator()(std::byte* bytes) const { free(bytes); }

PackedLinear::PackedLinear(const ConstMatrixView& weight, const float* bias, WeightOrder order, CpuIsa isa)
    : kernels_(&select_kernels(weight.dtype, isa)),
      isa_(isa),
      dtype_(weight.dtype),
      order_(order),
      in_features_(weight.num_columns),
      out_features_(order == WeightOrder::kGateUp ? weight.num_rows / 2 : weight.num_rows),
      num_weight_rows_(weight.num_rows) {
  require(isa <= best_cpu_isa(), "isa: this machine does not support it");
  require(in_features_ > 0 && out_features_ > 0, "weight: both dimensions must be positive");
  require(weight.row_stride >= in_features_ || num_weight_rows_ == 1, "weight: rows must not overlap");
  require(order == WeightOrder::kRows || num_weight_rows_ % 2 == 0, "weight: gate and up must have as many rows");
  num_blocks_ = divide_up(order == WeightOrder::kGateUp ? out_features_ * 2 : out_features_, kBlockColumns);
  block_bytes_ = kBlockColumns * round_up(in_features_, kernels_->depth_multiple) * dtype_bytes(dtype_);
  blocks_.reset(allocate_zeroed(num_bytes()));
  if (bias != nullptr) bias_.resize(static_cast<size_t>(num_blocks_ * kBlockColumns));
  parallel_for(num_blocks_, [&](int64_t block, int) {
    std::byte* packed = blocks_.get() + block * block_bytes_;
    for (int64_t column = 0; column < kBlockColumns; ++column) {
      const int64_t row = source_row(block, column);
      if (row < 0) continue;
      if (bias != nullptr) bias_[static_cast<size_t>(block * kBlockColumns + column)] = bias[row];
      const std::byte* from =
          static_cast<const std::byte*>(weight.data) + row * weight.row_stride * dtype_bytes(dtype_);
      if (dtype_ == DType::kFloat32) {
        pack_column(kernels_->layout, reinterpret_cast<uint32_t*>(packed), column,
                    reinterpret_cast<const uint32_t*>(from), in_features_);
      } else {
        pack_column(kernels_->layout, reinterpret_cast<uint16_t*>(packed), column,
                    reinterpret_cast<const uint16_t*>(from), in_features_);
      }
    }
  });
}

// The weight row that a packed column holds, or -1 for padding.
int64_t PackedLinear::source_row(int64_t block, int64_t column) const {
  if (order_ == WeightOrder::kRows) {
    const int64_t row = block * kBlockColumns + column;
    return row < out_features_ ? row : -1;
  }
  constexpr int64_t kHalf = kBlockColumns / 2;
  const int64_t output = block * kHalf + column % kHalf;
  if (output >= out_features_) return -1;
  return column < kHalf ? output : out_features_ + output;
}

void PackedLinear::unpack(void* weight) const {
  parallel_for(num_blocks_, [&](int64_t block, int) {
    const std::byte* packed = blocks_.get() + block * block_bytes_;
    for (int64_t column = 0; column < kBlockColumns; ++column) {
      const int64_t row = source_row(block, column);
      if (row < 0) continue;
      std::byte* to = static_cast<std::byte*>(weight) + row * in_features_ * dtype_bytes(dtype_);
      if (dtype_ == DType::kFloat32) {
        unpack_column(kernels_->layout, reinterpret_cast<const uint32_t*>(packed), column,
                      reinterpret_cast<uint32_t*>(to), in_features_);
      } else {
        unpack_column(kernels_->layout, reinterpret_cast<const uint16_t*>(packed), column,
                      reinterpret_cast<uint16_t*>(to), in_features_);
      }
    }
  });
}

void PackedLinear::check(const ConstMatrixView& x, const MatrixView& out, LinearEpilogue epilogue) const {
  require(x.num_columns == in_features_, "x: columns must equal in_features");
  require(out.num_columns == out_features_, "out: columns must equal out_features");
  require(x.num_rows == out.num_rows, "out: rows must equal the rows of x");
  require(x.dtype == dtype_, "x: dtype must equal the weight's");
  require(out.dtype == dtype_ || out.dtype == DType::kFloat32, "out: dtype must be the weight's or float32");
  require(out.num_rows <= 1 || out.row_stride >= out_features_, "out: rows must not overlap");
  require((epilogue == LinearEpilogue::kSiluMul) == (order_ == WeightOrder::kGateUp),
          "epilogue: gate-up weights take silu-mul, and only they");
}

void PackedLinear::apply(const ConstMatrixView& x, const MatrixView& out, LinearEpilogue epilogue) const {
  check(x, out, epilogue);
  const int64_t num_rows = x.num_rows;
  if (num_rows == 0) return;
  LinearTask task = {x.data,
                     x.row_stride,
                     num_rows,
                     in_features_,
                     blocks_.get(),
                     block_bytes_,
                     bias_.empty() ? nullptr : bias_.data(),
                     out.data,
                     out.row_stride,
                     out_features_,
                     out.dtype,
                     epilogue};
  const bool is_small = num_rows * in_features_ * num_blocks_ * kBlockColumns < kMinParallelWork;

  const int64_t scratch_bytes = kernels_->x_scratch_bytes(num_rows, in_features_);
  if (scratch_bytes != 0) {
    std::byte* const scratch = x_scratch(scratch_bytes);
    if (scratch_bytes < kChunkBytes) {
      kernels_->pack_x(task, scratch, 0, num_rows);
    } else {
      parallel_for(divide_up(num_rows, kPanelRows), [&](int64_t panel, int) {
        kernels_->pack_x(task, scratch, panel * kPanelRows, std::min(num_rows, (panel + 1) * kPanelRows));
      });
    }
    task.x = scratch;
    task.x_stride = scratch_bytes / num_rows / (kernels_->layout == BlockLayout::kPairs ? 2 : 4);
  }
  if (is_small) return kernels_->compute(task, 0, num_blocks_, 0, num_rows);

  const Partition parts = partition(num_blocks_, block_bytes_, num_rows);
  parallel_for(parts.num_block_chunks * parts.num_row_chunks, [&](int64_t chunk, int) {
    const int64_t first_block = chunk % parts.num_block_chunks * parts.blocks_per_chunk;
    const int64_t first_row = chunk / parts.num_block_chunks * parts.rows_per_chunk;
    kernels_->compute(task, first_block, std::min(num_blocks_, first_block + parts.blocks_per_chunk), first_row,
                      std::min(num_rows, first_row + parts.rows_per_chunk));
  });
}

}  // namespace pagemill
