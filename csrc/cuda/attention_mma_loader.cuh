// Tiles of keys and values in shared memory: their layout, their way from the pages, and 8-bit numbers made 16-bit.
#pragma once

#include "attention_mma_ptx.cuh"
#include "pagemill/params.h"

namespace pagemill::cuda::mma {

// Rows of kHeadSize 16-bit numbers in shared memory, in chunks of 16 bytes, so that eight rows of one column of chunks
// lie in different banks: chunk c of row r sits at c ^ (r % 8) where whole groups of eight chunks allow it; elsewhere
// rows are padded by one chunk, which makes their number odd.
template <int kHeadSize>
struct RowLayout {
  static constexpr int kChunks = kHeadSize / 8;
  static constexpr bool kIsSwizzled = kChunks % 8 == 0;
  static constexpr int kRowBytes = (kIsSwizzled ? kChunks : kChunks + 1) * 16;

  __device__ static uint32_t offset(int row, int chunk) {
    return row * kRowBytes + (kIsSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }
};

// What a lane of ldmatrix adds to the address of a 16 x 16 tile that begins at a row divisible by 8 and at chunk
// 2 * step: the row's part is fixed, the chunk's part depends on step where the layout is swizzled.
template <int kHeadSize>
struct LaneAddress {
  using Layout = RowLayout<kHeadSize>;
  uint32_t row_offset;
  uint32_t chunk_bit;  // 0 or 1: which half of the 16 columns
  uint32_t swizzle;

  __device__ LaneAddress(int row, int column_half)
      : row_offset(row * Layout::kRowBytes), chunk_bit(column_half), swizzle(row & 7) {}

  __device__ uint32_t offset(int step) const {
    if constexpr (Layout::kIsSwizzled) {
      const uint32_t in_group = (2 * (step & 3) + chunk_bit) ^ swizzle;
      return row_offset + in_group * 16 + (step >> 2) * 128;
    } else {
      return row_offset + (2 * step + chunk_bit) * 16;
    }
  }
};

// Where the rows of a tile of keys lie: lane g of a warp holds, for rows 8 g .. 8 g + 7, the row of the cache, counted
// over all pages and heads, or -1 where there is no page. A block size is a multiple of 8.
struct TileRows {
  int32_t first_of_group;
};

template <int kKeys>
__device__ inline TileRows find_rows(const PagedAttentionParams& p, const int32_t* table, int kv_head, int first_key,
                                     int end_key) {
  const int key = first_key + 8 * (threadIdx.x & 31);
  if ((threadIdx.x & 31) >= kKeys / 8 || key >= end_key) return {-1};
  const int block_bits = 31 - __clz(p.block_size);
  const int32_t page = table[key >> block_bits];
  if (static_cast<uint32_t>(page) >= static_cast<uint32_t>(p.num_blocks)) return {-1};
  return {(((page * p.num_kv_heads + kv_head) << block_bits) + (key & (p.block_size - 1)))};
}

// Starts the copies of a tile's rows of kRowSize bytes. Rows from end_key on and rows without a page become zeros: what
// the cache holds there may be NaN, and a weight of 0 does not undo that.
template <int kKeys, int kThreads, int kRowSize, typename Offset>
__device__ inline void copy_tile(uint32_t destination, const void* cache, const TileRows& rows, int first_key,
                                 int end_key, Offset offset) {
  constexpr int kChunks = kRowSize / 16;
  constexpr int kTotal = kKeys * kChunks;
  static_assert(kTotal % 32 == 0, "a warp takes part as a whole");
#pragma unroll
  for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    if (kTotal % kThreads != 0 && index >= kTotal) break;
    const int row = index / kChunks, chunk = index % kChunks;
    const int32_t first = __shfl_sync(0xffffffffu, rows.first_of_group, row >> 3);
    const bool is_present = first >= 0 && first_key + row < end_key;
    const int64_t cache_row = is_present ? first + (row & 7) : 0;
    copy_16_async(destination + offset(row, chunk),
                  static_cast<const uint8_t*>(cache) + cache_row * kRowSize + chunk * 16, is_present ? 16 : 0);
  }
}

// 8-bit numbers become 16-bit ones by moving their bits: sign to the top, exponent and mantissa below the place where
// the wider exponent ends; the difference of the exponents' biases is a factor, and all steps are exact.
struct Fp8Expansion {
  int shift;        // of exponent and mantissa to the right, from the byte's place at the top
  uint32_t factor;  // twice, as 16-bit numbers
};

template <typename T>
__device__ inline Fp8Expansion fp8_expansion(KvDType kv_dtype) {
  constexpr bool kIsBFloat16 = std::is_same_v<T, __nv_bfloat16>;
  if (kv_dtype == KvDType::kFp8E4M3) {
    return kIsBFloat16 ? Fp8Expansion{4, 0x7b807b80u} : Fp8Expansion{1, 0x5c005c00u};  // 2^120, 2^8
  }
  return kIsBFloat16 ? Fp8Expansion{3, 0x77807780u} : Fp8Expansion{0, 0x3c003c00u};  // 2^112, 1
}

// Two bytes at bits 8 .. 15 and 24 .. 31.
template <typename T>
__device__ inline uint32_t expand_pair(uint32_t bytes, const Fp8Expansion& expansion) {
  const uint32_t magnitude = (bytes & 0x7f007f00u) >> expansion.shift;
  return multiply_pairs<T>(magnitude | (bytes & 0x80008000u), expansion.factor);
}

// Four numbers in order.
template <typename T>
__device__ inline uint2 expand_four(uint32_t bytes, const Fp8Expansion& expansion) {
  return {expand_pair<T>(__byte_perm(bytes, 0, 0x1404), expansion),
          expand_pair<T>(__byte_perm(bytes, 0, 0x3424), expansion)};
}

// From rows of kHeadSize bytes without gaps to 16-bit rows in RowLayout.
template <typename T, int kKeys, int kThreads, int kHeadSize>
__device__ inline void expand_tile(uint8_t* destination, const uint8_t* source, const Fp8Expansion& expansion) {
  constexpr int kChunks = kHeadSize / 8;
  static_assert(kKeys * kChunks % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kKeys * kChunks / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const uint2 bytes = *reinterpret_cast<const uint2*>(source + index * 8);
    const uint2 low = expand_four<T>(bytes.x, expansion), high = expand_four<T>(bytes.y, expansion);
    *reinterpret_cast<uint4*>(destination + RowLayout<kHeadSize>::offset(index / kChunks, index % kChunks)) = {
        low.x, low.y, high.x, high.y};
  }
}

}  // namespace pagemill::cuda::mma
