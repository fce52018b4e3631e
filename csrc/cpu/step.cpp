// What a step reads about its tokens, from the sequences' histories and block tables; and the changes to those.
#include "error.h"
#include "pagemill/kernels.h"

namespace pagemill {
namespace {

int check(const PrepareStepParams& p) {
  if (p.query_start[0] != 0 || p.query_start[p.num_seqs] > p.num_tokens) {
    return fail("query_start is %d .. %d: it must ascend from 0 to at most %lld tokens", p.query_start[0],
                p.query_start[p.num_seqs], static_cast<long long>(p.num_tokens));
  }
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    const int64_t num_new = int64_t{p.query_start[b + 1]} - p.query_start[b];
    if (num_new < 0) {
      return fail("query_start[%lld] is %d, less than the %d before it", static_cast<long long>(b + 1),
                  p.query_start[b + 1], p.query_start[b]);
    }
    if (num_new == 0) continue;
    if (p.seq_slots[b] < 0 || p.seq_slots[b] >= p.num_slots) {
      return fail("seq_slots[%lld] is %d, outside the %lld rows of history and block_table", static_cast<long long>(b),
                  p.seq_slots[b], static_cast<long long>(p.num_slots));
    }
    if (p.context_lens[b] < num_new || p.context_lens[b] > p.max_model_len ||
        p.context_lens[b] > p.max_blocks * p.block_size) {
      return fail("context_lens[%lld] is %d: %lld new tokens, rows of %lld tokens and %lld blocks",
                  static_cast<long long>(b), p.context_lens[b], static_cast<long long>(num_new),
                  static_cast<long long>(p.max_model_len), static_cast<long long>(p.max_blocks));
    }
  }
  return 0;
}

void prepare_row(const PrepareStepParams& p, int64_t b) {
  const int32_t* history = p.history + p.seq_slots[b] * p.history_stride;
  const int32_t* blocks = p.block_table + p.seq_slots[b] * p.block_table_stride;
  for (int32_t t = p.query_start[b]; t < p.query_start[b + 1]; ++t) {
    const int32_t position = p.context_lens[b] - p.query_start[b + 1] + t;
    p.token_ids[t] = history[position];
    p.positions[t] = position;
    p.slot_mapping[t] = int64_t{blocks[position / p.block_size]} * p.block_size + position % p.block_size;
  }
}

}  // namespace
}  // namespace pagemill

extern "C" {

using namespace pagemill;

int pagemill_prepare_step(const PrepareStepParams* params) {
  const PrepareStepParams& p = *params;
  if (const int error = check(p)) return error;
  for (int64_t b = 0; b < p.num_seqs; ++b) {
    if (p.query_start[b] != p.query_start[b + 1]) prepare_row(p, b);
  }
  for (int64_t t = p.query_start[p.num_seqs]; t < p.num_tokens; ++t) {
    p.token_ids[t] = p.positions[t] = 0;
    p.slot_mapping[t] = -1;
  }
  return 0;
}

int pagemill_scatter(const ScatterParams* params) {
  const ScatterParams& p = *params;
  for (int64_t i = 0; i < p.num_values; ++i) {
    if (p.indices[i] >= p.target_size) {
      return fail("indices[%lld] is %lld, outside the target's %lld numbers", static_cast<long long>(i),
                  static_cast<long long>(p.indices[i]), static_cast<long long>(p.target_size));
    }
  }
  for (int64_t i = 0; i < p.num_values; ++i) {
    if (p.indices[i] < 0) continue;
    p.target[p.indices[i]] = p.values_are_int64 ? static_cast<int32_t>(static_cast<const int64_t*>(p.values)[i])
                                                : static_cast<const int32_t*>(p.values)[i];
  }
  return 0;
}
}
