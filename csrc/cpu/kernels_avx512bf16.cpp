#include "attention_bf16_dispatch.h"
#include "attention_dot_products.h"
#include "vocab_impl.h"

namespace pagemill {

const KernelTable& kernel_table_avx512bf16() {
  static constexpr KernelTable kTable = {
      rms_norm_rows,
      rotary_rows,
      activation_rows,
      merge_attention_rows,
      quantize_kv,
      bf16_attention_sizes,
      bf16_attention_task<DotProducts>,
      bf16_attention_fold<DotProducts>,
      vocab_stats,
      vocab_sum_exp,
      vocab_count_greater,
      vocab_to_float,
      vocab_weights,
      vocab_group_maxima,
      vocab_collect,
      vocab_buckets,
  };
  return kTable;
}

}  // namespace pagemill
