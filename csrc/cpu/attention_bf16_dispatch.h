// Which attention a processor with bfloat16 products runs: other numbers are left to what it shares with older ones.
#pragma once

#include "attention_bf16_impl.h"

namespace pagemill {
namespace {

AttentionSizes bf16_attention_sizes(const PagedAttentionParams& p) {
  if (p.dtype != DType::kBFloat16) return kernel_table_avx512().attention_sizes(p);
  AttentionSizes sizes{0, 1, 0, 0};
  with_head_size(p.head_size, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    sizes.tile_rows = Bf16Scratch<kHeadSize>::kMaxRows;
    sizes.scratch_bytes = sizeof(Bf16Scratch<kHeadSize>);
    sizes.row_floats = kPartialRowFloats<kHeadSize>;
  });
  return sizes;
}

template <typename Products, typename Functor>
PAGEMILL_INLINE void with_bf16_tile(const PagedAttentionParams& p, const AttentionTask& task, const NearTasks& near,
                                    void* scratch, Functor functor) {
  with_kv_type<BFloat16>(p.kv_dtype, [&](auto kv_number) {
    with_head_size(p.head_size, [&](auto head_size) {
      using Tile = Bf16AttentionTile<decltype(kv_number), decltype(head_size)::value, Products>;
      functor(Tile{p, task, near, *static_cast<typename Tile::Scratch*>(scratch)});
    });
  });
}

template <typename Products>
void bf16_attention_task(const PagedAttentionParams& p, const AttentionTask& task, const NearTasks& near,
                         float* partials, void* scratch) {
  if (p.dtype != DType::kBFloat16) return kernel_table_avx512().attention_task(p, task, near, partials, scratch);
  with_bf16_tile<Products>(p, task, near, scratch, [&](auto tile) { tile.run(partials); });
}

template <typename Products>
void bf16_attention_fold(const PagedAttentionParams& p, const AttentionTask& task, const float* partials,
                         void* scratch) {
  if (p.dtype != DType::kBFloat16) return kernel_table_avx512().attention_fold(p, task, partials, scratch);
  with_bf16_tile<Products>(p, task, NearTasks{}, scratch, [&](auto tile) { tile.fold(partials); });
}

}  // namespace
}  // namespace pagemill
