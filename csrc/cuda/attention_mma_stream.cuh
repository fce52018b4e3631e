// Keys and values on their way from the pages to the tensor cores.
#pragma once

#include "attention_mma_tiling.cuh"

namespace pagemill::cuda::mma {

// The tiles of keys and values of one item in shared memory, one after the other; the copies of the next are under way
// while one is used.
template <typename Tile, typename T, bool kIs8Bit>
class TileStream {
 public:
  __device__ TileStream(const PagedAttentionParams& p, const Item& item, uint8_t* shared)
      : params_(p), item_(item), shared_(shared), base_(shared_address(shared)) {}

  // Starts the copies of the item's first tile. All warps must have left the item before. page: of key 8 * lane of the
  // tile, as find_page() has it.
  __device__ void open(int32_t page) {
    page_ = page;
    start_copies(item_.begin_key);
  }

  // Waits for the tile at first_key and starts the copies of the next. What is given stays until the next call.
  __device__ void advance(int first_key, uint32_t& keys, uint32_t& values) {
    wait_copies<0>();
    __syncthreads();
    keys = base_;
    if constexpr (kIs8Bit) {
      if (params_.kv_dtype == KvDType::kFp8E4M3) {
        expand<true>();
      } else {
        expand<false>();
      }
      __syncthreads();
    } else {
      keys += stage_;
      stage_ ^= 2 * Tile::kTileBytes;
    }
    values = keys + Tile::kTileBytes;
    if (first_key + Tile::kKeys < item_.end_key) start_copies(first_key + Tile::kKeys);
  }

 private:
  static constexpr int kRowChunks = Tile::kHeadSize * (kIs8Bit ? 1 : 2) / 16;  // in the cache

  template <bool kIsE4M3>
  __device__ void expand() {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      expand_tile<T, kIsE4M3, Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(
          shared_ + which * Tile::kTileBytes, shared_ + 2 * Tile::kTileBytes + which * Tile::kRawBytes);
    }
  }

  // Of the tile whose pages have been looked up; looks up those of the next, long before they are asked for.
  __device__ void start_copies(int first_key) {
    const int32_t num_keys = item_.end_key - first_key, lane = threadIdx.x & 31, key = first_key + 8 * lane;
    const uint32_t row = ((page_ * params_.num_kv_heads + item_.kv_head) << (31 - __clz(params_.block_size))) +
                         (key & (params_.block_size - 1));
    const bool is_there = static_cast<uint32_t>(page_) < static_cast<uint32_t>(params_.num_blocks);
    const uint32_t first = is_there ? row * kRowChunks : kNoPage;
    const bool is_whole = __all_sync(0xffffffffu, is_there || lane >= Tile::kKeys / 8) && num_keys >= Tile::kKeys;
    page_ = lane < Tile::kKeys / 8 ? find_page(params_, item_, key + Tile::kKeys) : -1;
    if (is_whole) {
      copy<true>(first, num_keys);
    } else {
      copy<false>(first, num_keys);
    }
    commit_copies();
  }

  template <bool kIsWhole>
  __device__ void copy(uint32_t first_of_group, int num_keys) {
    if constexpr (kIs8Bit) {
      const auto offset = [](uint32_t row, uint32_t chunk) { return (row * kRowChunks + chunk) * 16; };
      const uint32_t keys = base_ + 2 * Tile::kTileBytes, values = keys + Tile::kRawBytes;
      copy_rows<Tile::kKeys, Tile::kThreads, kRowChunks, kIsWhole>(params_, keys, values, first_of_group, num_keys,
                                                                   offset);
    } else {
      const auto offset = [](uint32_t row, uint32_t chunk) { return RowLayout<Tile::kHeadSize>::offset(row, chunk); };
      const uint32_t keys = base_ + stage_, values = keys + Tile::kTileBytes;
      copy_rows<Tile::kKeys, Tile::kThreads, kRowChunks, kIsWhole>(params_, keys, values, first_of_group, num_keys,
                                                                   offset);
    }
  }

  const PagedAttentionParams& params_;
  const Item& item_;
  uint8_t* shared_;
  uint32_t base_;
  uint32_t stage_ = 0;  // bytes from base_ to where the next copies go
  int32_t page_ = -1;   // of rows 8 * lane .. 8 * lane + 7 of the next tile
};

}  // namespace pagemill::cuda::mma
