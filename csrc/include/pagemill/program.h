// A forward pass as a list of kernel calls whose buffers, weights and caches were bound once. A step gives it the
// batch.
//
// Buffers hold rows for up to max_tokens tokens; a run uses the first num_tokens of each.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "pagemill/linear.h"
#include "pagemill/params.h"

namespace pagemill {

// What changes from step to step. The memory must live until the run returns.
struct StepInputs {
  const int32_t* token_ids;     // [num_tokens]
  const int32_t* positions;     // [num_tokens] rows of cos_sin
  const float* cos_sin;         // [num_positions, rot_dim]
  const int64_t* slot_mapping;  // [num_tokens]
  const int32_t* block_tables;  // [num_table_rows, max_blocks]
  const int32_t* seq_slots;     // [num_seqs]
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  int64_t num_tokens, num_positions, num_table_rows, max_blocks, block_table_stride;
  int32_t num_seqs;
};

struct LinearCall {
  const PackedLinear* linear;
  const void* x;
  void* out;
  int64_t x_stride, out_stride;
  DType out_dtype;
  LinearEpilogue epilogue;
};

struct RopeAndStoreCall {
  RotaryParams rotary;
  StoreKvParams store;
};

// Members that StepInputs and num_tokens decide are filled in by each run.
using KernelCall = std::variant<GatherRowsParams, RmsNormParams, LinearCall, RopeAndStoreCall, PagedAttentionParams>;

class Program {
 public:
  explicit Program(int64_t max_tokens) : max_tokens_(max_tokens) {}

  void add(const KernelCall& call) { calls_.push_back(call); }
  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }

  // Runs all calls in order. elapsed_ns: null, or num_calls() counters to which the time of each call is added. Throws
  // std::invalid_argument for more tokens than the buffers hold and where a kernel refuses its inputs; what the calls
  // before it wrote stays written.
  void run(const StepInputs& inputs, int64_t* elapsed_ns) const;

 private:
  int64_t max_tokens_;
  std::vector<KernelCall> calls_;
};

}  // namespace pagemill
