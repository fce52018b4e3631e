// bf16 products by AMX tiles: 16 rows x 16 columns x 32 of depth per instruction, in blocks of 2 x 2 tiles.
#include <immintrin.h>

#include <chrono>

#include "linear_epilogue.h"

namespace pagemill {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileDepth = 32;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a block: 16 pairs x 32 columns
constexpr int64_t kPairRowBytes = kBlockColumns * 4;

int64_t num_steps(int64_t in_features) { return (in_features + kTileDepth - 1) / kTileDepth; }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3: sums (rows 0-15 and 16-31, columns 0-15 and 16-31); 4, 5: x; 6, 7: weights. One panel of num_rows <= 32.
void configure(int64_t num_rows) {
  const uint8_t top = static_cast<uint8_t>(num_rows < kTileRows ? num_rows : kTileRows);
  const uint8_t bottom = static_cast<uint8_t>(num_rows > kTileRows ? num_rows - kTileRows : kTileRows);
  TileConfig config;
  const uint8_t rows[8] = {top, top, bottom, bottom, top, bottom, kTileRows, kTileRows};
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = rows[i];
    config.bytes_per_row[i] = 64;
  }
  _tile_loadconfig(&config);
}

template <bool kPrefetch>
PAGEMILL_INLINE void prefetch_step(const std::byte* weights) {
  constexpr int64_t kDistance = 2 * kStepBytes;
  if constexpr (kPrefetch) {
#pragma GCC unroll 32
    for (int64_t line = 0; line < kStepBytes; line += 64) _mm_prefetch(weights + kDistance + line, _MM_HINT_T0);
  }
}

template <bool kPrefetch>
void panel_of_two(const std::byte* x, int64_t num_rows, const std::byte* weights, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    prefetch_step<kPrefetch>(weights);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weights, kPairRowBytes);
    _tile_loadd(7, weights + 64, kPairRowBytes);
    _tile_loadd(5, x + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x += num_rows * 64;
    weights += kStepBytes;
  }
  _tile_stored(0, sums, kBlockColumns * 4);
  _tile_stored(1, sums + 16, kBlockColumns * 4);
  _tile_stored(2, sums + kTileRows * kBlockColumns, kBlockColumns * 4);
  _tile_stored(3, sums + kTileRows * kBlockColumns + 16, kBlockColumns * 4);
}

template <bool kPrefetch>
void panel_of_one(const std::byte* x, int64_t num_rows, const std::byte* weights, int64_t steps, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t step = 0; step < steps; ++step) {
    prefetch_step<kPrefetch>(weights);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weights, kPairRowBytes);
    _tile_loadd(7, weights + 64, kPairRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    x += num_rows * 64;
    weights += kStepBytes;
  }
  _tile_stored(0, sums, kBlockColumns * 4);
  _tile_stored(1, sums + 16, kBlockColumns * 4);
}

// Weights come from memory for the first panel of rows and from the cache for the others.
template <bool kPrefetch>
void compute_panel(const LinearTask& task, int64_t block, int64_t row, int64_t num_rows) {
  alignas(64) float sums[kPanelRows * kBlockColumns];
  const int64_t steps = num_steps(task.in_features);
  const std::byte* x = static_cast<const std::byte*>(task.x) + row * steps * 64;
  const std::byte* weights = task.blocks + block * task.block_bytes;
  if (num_rows > kTileRows) {
    panel_of_two<kPrefetch>(x, num_rows, weights, steps, sums);
  } else {
    panel_of_one<kPrefetch>(x, num_rows, weights, steps, sums);
  }
  finish(task, sums, block, row, num_rows);
}

void compute(const LinearTask& task, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row) {
  int64_t configured_rows = 0;
  for (int64_t block = first_block; block < last_block; ++block) {
    for (int64_t row = first_row; row < last_row; row += kPanelRows) {
      const int64_t num_rows = last_row - row < kPanelRows ? last_row - row : kPanelRows;
      if (num_rows != configured_rows) configure(num_rows);
      configured_rows = num_rows;
      if (row == first_row) {
        compute_panel<true>(task, block, row, num_rows);
      } else {
        compute_panel<false>(task, block, row, num_rows);
      }
    }
  }
  _tile_release();
}

// x in the order in which the tiles read it: panels of 32 rows, in each the steps of depth, in each the rows.
int64_t x_scratch_bytes(int64_t num_rows, int64_t in_features) { return num_rows * num_steps(in_features) * 64; }

void pack_x(const LinearTask& task, void* scratch, int64_t first_row, int64_t last_row) {
  const int64_t steps = num_steps(task.in_features);
  for (int64_t panel = first_row; panel < last_row; panel += kPanelRows) {
    const int64_t num_rows = last_row - panel < kPanelRows ? last_row - panel : kPanelRows;
    std::byte* base = static_cast<std::byte*>(scratch) + panel * steps * 64;
    for (int64_t row = 0; row < num_rows; ++row) {
      const uint16_t* from = static_cast<const uint16_t*>(task.x) + (panel + row) * task.x_stride;
      std::byte* to = base + row * 64;
      const int64_t whole_steps = task.in_features / kTileDepth;
      for (int64_t step = 0; step < whole_steps; ++step, to += num_rows * 64) {
        _mm512_store_si512(to, _mm512_loadu_si512(from + step * kTileDepth));
      }
      const int64_t rest = task.in_features % kTileDepth;
      if (rest != 0) {
        const __mmask32 mask = (__mmask32{1} << rest) - 1;
        _mm512_store_si512(to, _mm512_maskz_loadu_epi16(mask, from + whole_steps * kTileDepth));
      }
    }
  }
}

}  // namespace

const LinearKernels& linear_kernels_amx() {
  static constexpr LinearKernels kKernels = {BlockLayout::kPairs, kTileDepth, x_scratch_bytes, pack_x, compute};
  return kKernels;
}

double peak_amx() {
  constexpr int kRounds = 500'000;
  configure(kPanelRows);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds; ++round) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  _tile_release();
  return 4.0 * 2 * 16 * 16 * 32 * kRounds / elapsed.count();
}

}  // namespace pagemill
