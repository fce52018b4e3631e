// Quantised weights of GGUF files to float32. Bound by memory, so one body for all processors is enough.
#include <algorithm>
#include <cstring>

#include "error.h"
#include "pagemill/kernels.h"
#include "pagemill/thread_pool.h"
#include "simd.h"

namespace pagemill {
namespace {

constexpr int64_t kBlockWeights = 32;
constexpr int64_t kBlocksPerChunk = 8192;

struct BlockLayout {
  int bits;
  bool has_minimum;

  constexpr int64_t bytes() const { return 2 + (has_minimum ? 2 : 0) + (bits == 5 ? 4 : 0) + (bits == 8 ? 32 : 16); }
};

float half_at(const uint8_t* bytes) {
  Float16 value;
  std::memcpy(&value, bytes, sizeof(value));
  return to_float(value);
}

// Without a minimum, numbers are signed: stored ones minus half their range.
template <int kBits, bool kHasMinimum>
void dequantize_blocks(const uint8_t* block, float* out, int64_t num_blocks) {
  constexpr int64_t kBytes = BlockLayout{kBits, kHasMinimum}.bytes();
  constexpr int kOffset = kHasMinimum ? 0 : 1 << (kBits - 1);
  for (int64_t b = 0; b < num_blocks; ++b, block += kBytes, out += kBlockWeights) {
    const float scale = half_at(block);
    const float minimum = kHasMinimum ? half_at(block + 2) : 0.0f;
    const uint8_t* packed = block + (kHasMinimum ? 4 : 2);
    int32_t numbers[kBlockWeights];
    if constexpr (kBits == 8) {
      for (int i = 0; i < kBlockWeights; ++i) numbers[i] = static_cast<int8_t>(packed[i]);
    } else {
      uint32_t fifth_bits = 0;
      if constexpr (kBits == 5) {
        std::memcpy(&fifth_bits, packed, sizeof(fifth_bits));
        packed += sizeof(fifth_bits);
      }
      for (int i = 0; i < kBlockWeights / 2; ++i) {
        numbers[i] = packed[i] & 15;
        numbers[i + kBlockWeights / 2] = packed[i] >> 4;
      }
      if constexpr (kBits == 5) {
        for (int i = 0; i < kBlockWeights; ++i) numbers[i] |= static_cast<int32_t>((fifth_bits >> i & 1) << 4);
      }
      for (int i = 0; i < kBlockWeights; ++i) numbers[i] -= kOffset;
    }
    for (int i = 0; i < kBlockWeights; ++i) {
      const float product = scale * static_cast<float>(numbers[i]);
      out[i] = kHasMinimum ? product + minimum : product;
    }
  }
}

struct BlockFormat {
  int64_t bytes;
  void (*dequantize)(const uint8_t* blocks, float* out, int64_t num_blocks);
};

template <int kBits, bool kHasMinimum>
constexpr BlockFormat format_of() {
  return {BlockLayout{kBits, kHasMinimum}.bytes(), dequantize_blocks<kBits, kHasMinimum>};
}

bool find_format(BlockType type, BlockFormat* format) {
  switch (type) {
    case BlockType::kQ4_0:
      return *format = format_of<4, false>(), true;
    case BlockType::kQ4_1:
      return *format = format_of<4, true>(), true;
    case BlockType::kQ5_0:
      return *format = format_of<5, false>(), true;
    case BlockType::kQ5_1:
      return *format = format_of<5, true>(), true;
    case BlockType::kQ8_0:
      return *format = format_of<8, false>(), true;
  }
  return false;
}

}  // namespace
}  // namespace pagemill

extern "C" int pagemill_dequantize(const pagemill::DequantizeParams* params) {
  using namespace pagemill;
  const DequantizeParams& p = *params;
  BlockFormat format;
  if (!find_format(p.type, &format)) return fail("block type %d is not supported", static_cast<int>(p.type));
  const uint8_t* blocks = static_cast<const uint8_t*>(p.blocks);
  parallel_for((p.num_blocks + kBlocksPerChunk - 1) / kBlocksPerChunk, [&](int64_t chunk, int) {
    const int64_t first = chunk * kBlocksPerChunk;
    format.dequantize(blocks + first * format.bytes, p.out + first * kBlockWeights,
                      std::min(kBlocksPerChunk, p.num_blocks - first));
  });
  return 0;
}
