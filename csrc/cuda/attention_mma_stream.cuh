// Keys and values on their way from the pages to the tensor cores.
#pragma once

#include "attention_mma_tiling.cuh"

namespace pagemill::cuda::mma {

// The tiles of keys and values of one item in shared memory, one after the other; the copies of the next kStages - 1
// are under way while one is used, or of the next one where the cache has 8 bits.
template <typename Tile, typename T, bool kIs8Bit>
class TileStream {
 public:
  __device__ TileStream(const PagedAttentionParams& p, const Item& item, uint8_t* shared)
      : params_(p), item_(item), shared_(shared), base_(shared_address(shared)) {}

  // Starts the copies of the item's first tiles. All warps must have left the item before. page: of key 8 * lane of the
  // first tile, as find_page() has it.
  __device__ void open(int32_t page) {
    page_ = page;
    next_key_ = item_.begin_key;
    to_ = from_ = 0;
#pragma unroll
    for (int i = 0; i < (kIs8Bit ? 1 : Tile::kStages - 1); ++i) start_copies();
  }

  // Waits for the next tile and starts the copies of a later one. What is given stays until the next call.
  __device__ void advance(uint32_t& keys, uint32_t& values) {
    wait_copies<kIs8Bit ? 0 : Tile::kStages - 2>();
    __syncthreads();
    if constexpr (kIs8Bit) {
      const Fp8Expansion expansion = fp8_expansion<T>(params_.kv_dtype);
      expand(0, expansion);
      expand(1, expansion);
      __syncthreads();
    }
    keys = base_ + from_;
    values = keys + Tile::kTileBytes;
    from_ = after(from_);
    start_copies();
  }

 private:
  static constexpr int kRowChunks = Tile::kHeadSize * (kIs8Bit ? 1 : 2) / 16;  // in the cache

  __device__ static uint32_t after(uint32_t stage) {
    if constexpr (kIs8Bit) return 0;
    constexpr uint32_t kStageBytes = 2 * Tile::kTileBytes;
    return stage == (Tile::kStages - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }

  __device__ void expand(int which, const Fp8Expansion& expansion) {
    expand_tile<T, Tile::kKeys, Tile::kThreads, Tile::kHeadSize>(
        shared_ + which * Tile::kTileBytes, shared_ + 2 * Tile::kTileBytes + which * Tile::kRawBytes, expansion);
  }

  // Of the tile at next_key_, if there is one; then looks up the pages of the one after, long before they are asked
  // for.
  __device__ void start_copies() {
    const int32_t num_keys = item_.end_key - next_key_;
    if (num_keys > 0) {
      const int32_t lane = threadIdx.x & 31, key = next_key_ + 8 * lane;
      const uint32_t row = ((page_ * params_.num_kv_heads + item_.kv_head) << (31 - __clz(params_.block_size))) +
                           (key & (params_.block_size - 1));
      const bool is_there = static_cast<uint32_t>(page_) < static_cast<uint32_t>(params_.num_blocks);
      const uint32_t first = is_there ? row * kRowChunks : kNoPage;
      const bool is_whole = __all_sync(0xffffffffu, is_there || lane >= Tile::kKeys / 8) && num_keys >= Tile::kKeys;
      next_key_ += Tile::kKeys;
      page_ = lane < Tile::kKeys / 8 ? find_page(params_, item_, key + Tile::kKeys) : -1;
      if (is_whole) {
        copy<true>(first, num_keys);
      } else {
        copy<false>(first, num_keys);
      }
      to_ = after(to_);
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
      const uint32_t keys = base_ + to_, values = keys + Tile::kTileBytes;
      copy_rows<Tile::kKeys, Tile::kThreads, kRowChunks, kIsWhole>(params_, keys, values, first_of_group, num_keys,
                                                                   offset);
    }
  }

  const PagedAttentionParams& params_;
  const Item& item_;
  uint8_t* shared_;
  uint32_t base_;
  uint32_t to_ = 0, from_ = 0;  // bytes from base_ to where the next copies go, and to the next tile
  int32_t next_key_ = 0;        // of the tile whose copies come next
  int32_t page_ = -1;           // of rows 8 * lane .. 8 * lane + 7 of that tile
};

}  // namespace pagemill::cuda::mma
