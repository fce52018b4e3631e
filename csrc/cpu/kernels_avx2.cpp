#include "attention_impl.h"
#include "vocab_impl.h"

namespace pagemill {

const KernelTable& kernel_table_avx2() {
  static constexpr KernelTable kTable = {
      rms_norm_rows, rotary_rows,           activation_rows,      merge_attention_rows,
      quantize_kv,   float_attention_sizes, float_attention_task, float_attention_fold,
      vocab_stats,   vocab_sum_exp,         vocab_count_greater,  vocab_to_float,
      vocab_weights, vocab_group_maxima,    vocab_collect,        vocab_buckets,
  };
  return kTable;
}

}  // namespace pagemill
