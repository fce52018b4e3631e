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
  // GCC's intrinsic tells the compiler about the first eight bytes only: without this, stores to the rest may go.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// Up to 32 rows times one block of columns.
struct Panel {
  const std::byte* x;
  const std::byte* weights;
  int64_t num_rows, steps;
  const std::byte* prefetch;  // where the next weights to be needed begin
  float* sums;                // [num_rows][32], padded to 16 or 32 rows
};

// The weights that come next are fetched while these are multiplied: kLines cache lines a step.
template <int kLines>
PAGEMILL_INLINE void prefetch_lines(const std::byte* weights) {
#pragma GCC unroll 32
  for (int line = 0; line < kLines; ++line) _mm_prefetch(weights + line * 64, kLines == 32 ? _MM_HINT_T0 : _MM_HINT_T1);
}

template <int kLines>
void panel_of_two(const Panel& panel) {
  constexpr int64_t kRowBytes = kBlockColumns * 4;
  float* const lower = panel.sums + kTileRows * kBlockColumns;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const std::byte* x = panel.x;
  const std::byte* weights = panel.weights;
  const std::byte* prefetch = panel.prefetch;
  for (int64_t step = 0; step < panel.steps; ++step) {
    prefetch_lines<kLines>(prefetch);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weights, kPairRowBytes);
    _tile_loadd(7, weights + 64, kPairRowBytes);
    _tile_loadd(5, x + kTileBytes, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x += panel.num_rows * 64;
    weights += kStepBytes;
    prefetch += kLines * 64;
  }
  _tile_stored(0, panel.sums, kRowBytes);
  _tile_stored(1, panel.sums + 16, kRowBytes);
  _tile_stored(2, lower, kRowBytes);
  _tile_stored(3, lower + 16, kRowBytes);
}

template <int kLines>
void panel_of_one(const Panel& panel) {
  constexpr int64_t kRowBytes = kBlockColumns * 4;
  _tile_zero(0);
  _tile_zero(1);
  const std::byte* x = panel.x;
  const std::byte* weights = panel.weights;
  const std::byte* prefetch = panel.prefetch;
  for (int64_t step = 0; step < panel.steps; ++step) {
    prefetch_lines<kLines>(prefetch);
    _tile_loadd(4, x, 64);
    _tile_loadd(6, weights, kPairRowBytes);
    _tile_loadd(7, weights + 64, kPairRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    x += panel.num_rows * 64;
    weights += kStepBytes;
    prefetch += kLines * 64;
  }
  _tile_stored(0, panel.sums, kRowBytes);
  _tile_stored(1, panel.sums + 16, kRowBytes);
}

template <int kLines>
PAGEMILL_INLINE void multiply(const Panel& panel) {
  if (panel.num_rows > kTileRows) {
    panel_of_two<kLines>(panel);
  } else {
    panel_of_one<kLines>(panel);
  }
}

// Lines a step that bring one block of weights within the time of num_panels panels.
int prefetch_lines_per_step(int64_t num_panels) {
  int lines = 32;
  while (lines > 2 && lines / 2 * num_panels >= 32) lines /= 2;
  return lines;
}

void multiply_with_prefetch(const Panel& panel, int lines) {
  switch (lines) {
    case 32:
      return multiply<32>(panel);
    case 16:
      return multiply<16>(panel);
    case 8:
      return multiply<8>(panel);
    case 4:
      return multiply<4>(panel);
    case 2:
      return multiply<2>(panel);
    default:
      return multiply<0>(panel);
  }
}

// One block of columns for all rows of the chunk.
void compute_block(const LinearTask& task, int64_t block, int64_t first_row, int64_t last_row, bool is_last) {
  alignas(64) float sums[kPanelRows * kBlockColumns];
  const int64_t steps = num_steps(task.in_features);
  const int64_t num_panels = (last_row - first_row + kPanelRows - 1) / kPanelRows;
  const int lines = prefetch_lines_per_step(num_panels);
  int64_t configured_rows = 0;
  Panel panel;
  panel.weights = task.blocks + block * task.block_bytes;
  panel.steps = steps;
  panel.sums = sums;
  for (int64_t index = 0; index < num_panels; ++index) {
    const int64_t row = first_row + index * kPanelRows;
    panel.num_rows = last_row - row < kPanelRows ? last_row - row : kPanelRows;
    if (panel.num_rows != configured_rows) configure(panel.num_rows);
    configured_rows = panel.num_rows;
    panel.x = static_cast<const std::byte*>(task.x) + row * steps * 64;
    // With one panel the weights stream past: fetch a little ahead. With several, the panels share the fetching of the
    // next block; another thread may own what follows the last.
    panel.prefetch = panel.weights + (num_panels == 1 ? 2 * kStepBytes : task.block_bytes + index * steps * lines * 64);
    multiply_with_prefetch(panel, num_panels > 1 && is_last ? 0 : lines);
    finish(task, sums, block, row, panel.num_rows);
  }
}

void compute(const LinearTask& task, int64_t first_block, int64_t last_block, int64_t first_row, int64_t last_row) {
  for (int64_t block = first_block; block < last_block; ++block) {
    compute_block(task, block, first_row, last_row, block + 1 == last_block);
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
