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

  __device__ static uint32_t offset(uint32_t row, uint32_t chunk) {
    return row * kRowBytes + (kIsSwizzled ? chunk ^ (row & 7) : chunk) * 16;
  }
};

// Where a lane of ldmatrix finds its row of the 16 x 16 tiles of one row of tiles.
template <int kHeadSize>
class LaneAddress {
 public:
  // row: of the first tile's 16 rows; column_half: which 8 of its 16 columns. `tile` lies at a multiple of 128 bytes
  // where the layout is swizzled.
  __device__ LaneAddress(uint32_t tile, int row, int column_half) : first_(tile + Layout::offset(row, column_half)) {}

  // The column of tiles `step`, of the row of tiles `tile_row`. The chunk is 2 * step + column_half, so that an
  // exclusive or with a constant swizzles it.
  __device__ uint32_t at(int tile_row, int step) const {
    const uint32_t row_bytes = tile_row * 16 * Layout::kRowBytes;
    if constexpr (Layout::kIsSwizzled) return (first_ ^ (step & 3) << 5) + (step >> 2) * 128 + row_bytes;
    return first_ + step * 32 + row_bytes;
  }

 private:
  using Layout = RowLayout<kHeadSize>;
  uint32_t first_;
};

// Starts the copies of a tile's rows of keys and of values, kRowChunks chunks of 16 bytes each. Lane g of each warp
// knows where rows 8 g .. 8 g + 7 begin in either cache, counted in chunks, or kNoPage. Rows without a page and rows
// from num_keys on become zeros: what the cache holds there may be NaN, and a weight of 0 does not undo that.
constexpr uint32_t kNoPage = 0xffffffffu;

template <int kKeys, int kThreads, int kRowChunks, bool kIsWhole, typename Offset>
__device__ inline void copy_rows(const PagedAttentionParams& p, uint32_t keys, uint32_t values, uint32_t first_of_group,
                                 int num_keys, Offset offset) {
  constexpr int kTotal = kKeys * kRowChunks;
  static_assert(kTotal % 32 == 0, "a warp takes part as a whole");
#pragma unroll
  for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
    const uint32_t index = threadIdx.x + i * kThreads;
    if (kTotal % kThreads != 0 && index >= kTotal) break;
    const uint32_t row = index / kRowChunks, chunk = index % kRowChunks;
    const uint32_t first = __shfl_sync(0xffffffffu, first_of_group, row >> 3);
    const bool is_present = kIsWhole || (first != kNoPage && static_cast<int>(row) < num_keys);
    const uint32_t place = is_present ? first + (row & 7) * kRowChunks + chunk : 0;
    const uint32_t to = offset(row, chunk);
    copy_16_async(keys + to, static_cast<const uint4*>(p.key_cache) + place, is_present ? 16 : 0);
    copy_16_async(values + to, static_cast<const uint4*>(p.value_cache) + place, is_present ? 16 : 0);
  }
}

// Four 8-bit numbers as float16, exactly: also infinities and NaN.
template <bool kIsE4M3>
__device__ inline uint2 widen_four(uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (kIsE4M3) return {widen_e4m3(static_cast<uint16_t>(bytes)), widen_e4m3(bytes >> 16)};
#endif
  uint2 four{__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
  if constexpr (kIsE4M3) four = {widen_e4m3_by_bits(four.x), widen_e4m3_by_bits(four.y)};
  return four;
}

template <typename T, bool kIsE4M3>
__device__ inline uint2 expand_four(uint32_t bytes) {
  const uint2 four = widen_four<kIsE4M3>(bytes);
  if constexpr (std::is_same_v<T, __half>) return four;
  const float2 low = unpack_half(four.x), high = unpack_half(four.y);
  return {pack<T>(low.x, low.y), pack<T>(high.x, high.y)};
}

// From rows of kHeadSize bytes without gaps to 16-bit rows in RowLayout.
template <typename T, bool kIsE4M3, int kKeys, int kThreads, int kHeadSize>
__device__ inline void expand_tile(uint8_t* destination, const uint8_t* source) {
  constexpr int kChunks = kHeadSize / 8;
  constexpr int kTotal = kKeys * kChunks;
#pragma unroll
  for (int i = 0; i < (kTotal + kThreads - 1) / kThreads; ++i) {
    const uint32_t index = threadIdx.x + i * kThreads;
    if (kTotal % kThreads != 0 && index >= kTotal) break;
    const uint2 bytes = *reinterpret_cast<const uint2*>(source + index * 8);
    const uint2 low = expand_four<T, kIsE4M3>(bytes.x), high = expand_four<T, kIsE4M3>(bytes.y);
    *reinterpret_cast<uint4*>(destination + RowLayout<kHeadSize>::offset(index / kChunks, index % kChunks)) = {
        low.x, low.y, high.x, high.y};
  }
}

}  // namespace pagemill::cuda::mma
