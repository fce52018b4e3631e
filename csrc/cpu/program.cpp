#include "pagemill/program.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include "pagemill/kernels.h"

namespace pagemill {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void raise_on(int error) {
  if (error != 0) throw std::invalid_argument(pagemill_last_error());
}

void call(GatherRowsParams p, const StepInputs& step) {
  p.ids = step.token_ids;
  p.num_rows = step.num_tokens;
  raise_on(pagemill_gather_rows(&p));
}

void call(RmsNormParams p, const StepInputs& step) {
  p.num_tokens = step.num_tokens;
  raise_on(pagemill_rms_norm(&p));
}

void call(const LinearCall& c, const StepInputs& step) {
  const PackedLinear& linear = *c.linear;
  linear.apply({c.x, step.num_tokens, linear.in_features(), c.x_stride, linear.dtype()},
               {c.out, step.num_tokens, linear.out_features(), c.out_stride, c.out_dtype}, c.epilogue);
}

void call(RopeAndStoreCall c, const StepInputs& step) {
  c.rotary.positions = step.positions;
  c.rotary.cos_sin = step.cos_sin;
  c.rotary.num_tokens = step.num_tokens;
  c.rotary.max_positions = step.num_positions;
  c.store.slot_mapping = step.slot_mapping;
  c.store.num_tokens = step.num_tokens;
  raise_on(pagemill_rope_and_store(&c.rotary, &c.store));
}

void call(PagedAttentionParams p, const StepInputs& step) {
  p.block_tables = step.block_tables;
  p.seq_slots = step.seq_slots;
  p.query_start = step.query_start;
  p.context_lens = step.context_lens;
  p.num_tokens = step.num_tokens;
  p.num_table_rows = step.num_table_rows;
  p.max_blocks = step.max_blocks;
  p.block_table_stride = step.block_table_stride;
  p.num_seqs = step.num_seqs;
  raise_on(pagemill_paged_attention(&p));
}

}  // namespace

void Program::run(const StepInputs& inputs, int64_t* elapsed_ns) const {
  if (inputs.num_tokens < 0 || inputs.num_tokens > max_tokens_) {
    throw std::invalid_argument("num_tokens is " + std::to_string(inputs.num_tokens) + ", the buffers hold " +
                                std::to_string(max_tokens_));
  }
  int64_t started_ns = elapsed_ns != nullptr ? now_ns() : 0;
  for (size_t i = 0; i < calls_.size(); ++i) {
    std::visit([&](const auto& bound) { call(bound, inputs); }, calls_[i]);
    if (elapsed_ns == nullptr) continue;
    const int64_t ended_ns = now_ns();
    elapsed_ns[i] += ended_ns - started_ns;
    started_ns = ended_ns;
  }
}

}  // namespace pagemill
