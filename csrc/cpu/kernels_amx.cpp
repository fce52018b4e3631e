#include "attention_amx_impl.h"
#include "vocab_impl.h"

namespace pagemill {
namespace {

// Calls the functor with a head size that tiles divide; false for the others and for other dtypes.
template <typename Functor>
bool with_amx_head_size(const PagedAttentionParams& p, Functor functor) {
  if (p.dtype != DType::kBFloat16) return false;
  switch (p.head_size) {
    case 64:
      return functor(Constant<64>{}), true;
    case 96:
      return functor(Constant<96>{}), true;
    case 128:
      return functor(Constant<128>{}), true;
    case 192:
      return functor(Constant<192>{}), true;
    case 256:
      return functor(Constant<256>{}), true;
    default:
      return false;
  }
}

int64_t partial_floats(const PagedAttentionParams& p) { return int64_t{kMaxAmxVectors} * 16 * (2 + p.head_size); }

template <typename Functor>
bool with_amx_tile(const PagedAttentionParams& p, const AttentionTask& task, void* scratch, Functor functor) {
  return with_amx_head_size(p, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    const auto run_width = [&](auto vectors) {
      using Tile = AmxAttentionTile<kHeadSize, decltype(vectors)::value>;
      functor(Tile{p, task, *static_cast<typename Tile::Scratch*>(scratch)});
    };
    if (task.num_rows <= 16) {
      run_width(Constant<1>{});
    } else if (task.num_rows <= 32) {
      run_width(Constant<2>{});
    } else {
      run_width(Constant<4>{});
    }
  });
}

AttentionSizes attention_sizes(const PagedAttentionParams& p) {
  AttentionSizes sizes{kMaxAmxVectors * 16, 0, partial_floats(p)};
  const bool supported = with_amx_head_size(p, [&](auto head_size) {
    sizes.scratch_bytes = sizeof(AmxScratch<decltype(head_size)::value, kMaxAmxVectors * 16>);
  });
  return supported ? sizes : float_attention_sizes(p);
}

void attention_task(const PagedAttentionParams& p, const AttentionTask& task, float* partials, void* scratch) {
  if (with_amx_tile(p, task, scratch, [&](auto tile) { tile.run(partials, partial_floats(p)); })) return;
  float_attention_task(p, task, partials, scratch);
}

void attention_fold(const PagedAttentionParams& p, const AttentionTask& task, const float* partials, void* scratch) {
  if (with_amx_tile(p, task, scratch, [&](auto tile) { tile.fold(partials, partial_floats(p)); })) return;
  float_attention_fold(p, task, partials, scratch);
}

}  // namespace

const KernelTable& kernel_table_amx() {
  static constexpr KernelTable kTable = {
      rms_norm_rows, rotary_rows,   activation_rows,     attention_sizes, attention_task, attention_fold,
      vocab_stats,   vocab_sum_exp, vocab_count_greater, vocab_to_float,  vocab_weights,
  };
  return kTable;
}

}  // namespace pagemill
