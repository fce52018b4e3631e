// Parameters of every kernel: plain structs on raw pointers, the same for CPU and CUDA.
//
// Strides count elements, not bytes. The innermost dimension is always contiguous. The caller owns all memory; a
// kernel keeps no pointer after it returns.
#pragma once

#include <cstdint>

namespace pagemill {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int64_t dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// How the paged cache holds its numbers: as the activations do, or in 8 bits with a scale per KV head.
enum class KvDType : int32_t { kActivation = 0, kFp8E4M3 = 1, kFp8E5M2 = 2 };

constexpr int64_t kv_bytes(KvDType kv_dtype, DType dtype) {
  return kv_dtype == KvDType::kActivation ? dtype_bytes(dtype) : 1;
}

// out = x / rms(x) * weight over rows of `hidden`. With `residual`: residual += x first, and out is the norm of that.
// x is of dtype or float32; the residual is of x's type or float32.
struct RmsNormParams {
  void* out;           // [num_tokens, hidden]
  const void* x;       // [num_tokens, hidden]
  void* residual;      // [num_tokens, hidden] or null; updated in place
  const void* weight;  // [hidden]
  int64_t num_tokens, hidden;
  int64_t out_stride, x_stride, residual_stride;
  float epsilon;
  DType dtype;  // of out and weight
  DType x_dtype, residual_dtype;
};

// What a step reads about each new token, from what is known of the sequences. Token t of row b (query_start[b] <= t <
// query_start[b + 1]) has position context_lens[b] - query_start[b + 1] + t; its id is at that position of the row's
// history and its slot in the block of the row's table that holds the position. Tokens from query_start[num_seqs] on
// are padding: id 0, position 0, slot -1.
struct PrepareStepParams {
  int32_t* token_ids;           // [num_tokens]
  int32_t* positions;           // [num_tokens]
  int64_t* slot_mapping;        // [num_tokens]
  const int32_t* history;       // [num_slots, max_model_len], rows may be strided
  const int32_t* block_table;   // [num_slots, max_blocks], rows may be strided
  const int32_t* seq_slots;     // [num_seqs] row of history and block_table
  const int32_t* query_start;   // [num_seqs + 1], ascending from 0; rows may be empty
  const int32_t* context_lens;  // [num_seqs], this step's tokens included
  int64_t num_tokens, num_seqs, num_slots, max_model_len, max_blocks;
  int64_t history_stride, block_table_stride;
  int32_t block_size;
};

// target[indices[i]] = values[i]; negative indices are skipped. Of equal indices any one's value stays.
struct ScatterParams {
  int32_t* target;         // [target_size]
  const int64_t* indices;  // [num_values]
  const void* values;      // [num_values] int32 or int64, within int32
  int64_t target_size, num_values;
  bool values_are_int64;
};

enum class RotaryLayout : int32_t {
  kNeox = 0,         // pairs (i, i + rot_dim / 2)
  kInterleaved = 1,  // pairs (2 i, 2 i + 1)
};

// Rotates the first rot_dim dimensions of each head of q and k in place. With caches: also stores k and v into pages.
struct RotaryParams {
  void* q;                // [num_tokens, num_query_heads, head_size]
  void* k;                // [num_tokens, num_kv_heads, head_size]
  const void* positions;  // [num_tokens] int32 or int64
  const float* cos_sin;   // [max_positions, rot_dim]: rot_dim / 2 cosines, then as many sines
  int64_t num_tokens, max_positions;
  int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride;
  int32_t num_query_heads, num_kv_heads, head_size, rot_dim;
  bool positions_are_int64;
  RotaryLayout layout;
  DType dtype;
};

// Writes the keys and values of each token into its slot of the paged cache. Slot -1 is skipped.
struct StoreKvParams {
  const void* key;              // [num_tokens, num_kv_heads, head_size]
  const void* value;            // [num_tokens, num_kv_heads, head_size]
  void* key_cache;              // [num_blocks, num_kv_heads, block_size, head_size], contiguous
  void* value_cache;            // same
  const int64_t* slot_mapping;  // [num_tokens]: block * block_size + offset
  const float* key_scale;       // [num_kv_heads] or null (1): an 8-bit cache holds number / scale, rounded to even
  const float* value_scale;     // same; numbers beyond the largest finite one are clipped to it
  int64_t num_tokens, num_blocks;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int32_t num_kv_heads, head_size, block_size;
  DType dtype;
  KvDType kv_dtype;
};

// Causal attention of each sequence's new tokens to all its tokens so far, through the block tables. The new tokens
// of sequence b are rows query_start[b] .. query_start[b + 1] - 1 and the last ones of its context_lens[b] tokens.
struct PagedAttentionParams {
  void* out;                    // [num_tokens, num_query_heads, head_size]
  const void* query;            // [num_tokens, num_query_heads, head_size]
  const void* key_cache;        // [num_blocks, num_kv_heads, block_size, head_size], contiguous
  const void* value_cache;      // same
  const int32_t* block_tables;  // [num_table_rows, max_blocks], rows may be strided
  const int32_t* seq_slots;     // [num_seqs] row of block_tables, or null: row b for sequence b
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs] tokens in the cache, this step's included
  const float* alibi_slopes;    // [num_query_heads] or null
  const float* sinks;           // [num_query_heads] or null: a logit that takes part in the softmax without a value
  float* lse;                   // [num_tokens, num_query_heads] or null: log of the softmax denominator
  const float* key_scale;       // [num_kv_heads] or null (1): what an 8-bit cache's numbers are multiplied with
  const float* value_scale;     // same
  int64_t num_tokens, num_blocks, num_table_rows, max_blocks;
  int64_t out_token_stride, out_head_stride, query_token_stride, query_head_stride, block_table_stride;
  int32_t num_seqs, num_query_heads, num_kv_heads, head_size, block_size;
  int32_t window;  // keys that a token sees, itself included; -1: all
  float scale, soft_cap;
  DType dtype;
  KvDType kv_dtype;
};

// Joins two results of attention of the same queries to disjoint sets of keys (cascade and context parallel):
// out = (a * exp(lse_a) + b * exp(lse_b)) / (exp(lse_a) + exp(lse_b)), lse = log of that denominator. A side whose lse
// is -inf saw no key. out may be a or b; lse may be lse_a or lse_b.
struct MergeAttentionParams {
  void* out;           // [num_rows, head_size]; a row is one head of one token
  float* lse;          // [num_rows] or null
  const void* a;       // [num_rows, head_size]
  const float* lse_a;  // [num_rows]
  const void* b;       // [num_rows, head_size]
  const float* lse_b;  // [num_rows]
  int64_t num_rows, head_size;
  DType dtype;
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2 };

// out = activation(gate) * up, where a row of gate_up is [gate, up].
struct ActivationParams {
  void* out;            // [num_tokens, size]
  const void* gate_up;  // [num_tokens, 2 * size]
  int64_t num_tokens, size, out_stride, gate_up_stride;
  Activation activation;
  DType dtype;
};

// out[i] = table[ids[i]]: embedding lookup and row gathering.
struct GatherRowsParams {
  void* out;          // [num_rows, row_bytes]
  const void* table;  // [num_table_rows, row_bytes]
  const void* ids;    // [num_rows] int32 or int64
  int64_t num_rows, num_table_rows, row_bytes, out_stride_bytes, table_stride_bytes;
  bool ids_are_int64;
  bool is_widening;  // out is float32, table is of dtype; row_bytes are the table's
  DType dtype;       // of the table; read where is_widening
};

// Copies whole blocks inside each layer's caches, in order. caches: 2 * num_layers base addresses.
struct CopyBlocksParams {
  void* const* caches;
  const int64_t* sources;       // [num_copies]
  const int64_t* destinations;  // [num_copies]
  int64_t num_caches, num_copies, num_blocks, block_bytes;
};

// Copies whole blocks between each layer's caches and their copies in host memory: blocks[i] of a cache from or to
// host_blocks[i]. On CUDA host memory must be pinned, and the copies are ordered by the stream.
enum class SwapDirection : int32_t { kToHost = 0, kToDevice = 1 };

struct SwapBlocksParams {
  void* const* caches;         // [num_caches] base addresses
  void* const* host_caches;    // [num_caches] base addresses
  const int64_t* blocks;       // [num_copies], in host memory
  const int64_t* host_blocks;  // [num_copies], in host memory
  int64_t num_caches, num_copies, num_blocks, num_host_blocks, block_bytes;
  SwapDirection direction;
};

// One token per row of logits. Per-row arrays may be null: the value in brackets holds for every row then.
//
// Order: logit bias, repetition, frequency and presence penalties, masked ids, temperature, top-k, top-p, min-p.
struct SampleParams {
  const void* logits;               // [num_rows, vocab_size]
  const float* temperature;         // [0]; below 1e-5: the largest logit, first index on ties
  const int32_t* top_k;             // [0: off]
  const float* top_p;               // [1]
  const float* min_p;               // [0]
  const uint64_t* seeds;            // [0]
  const int64_t* positions;         // [0]; the draw depends on (seed, position) alone
  const float* presence_penalty;    // [0]
  const float* frequency_penalty;   // [0]
  const float* repetition_penalty;  // [1]
  const int32_t* prompt_offsets;    // [num_rows + 1], or [num_rows] with prompt_ends; or null
  const int32_t* prompt_ends;  // [num_rows] or null: those of the next row's offset. Row r: offsets[r] .. ends[r] - 1
  const int32_t* prompt_ids;   // token ids of the prompts, at these places
  const int32_t* output_offsets;  // as prompt_offsets
  const int32_t* output_ends;     // as prompt_ends
  const int32_t* output_ids;      // token ids generated so far
  const int32_t* bias_offsets;    // [num_rows + 1] or null
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* masked_offsets;  // [num_rows + 1] or null
  const int32_t* masked_ids;      // may not be sampled
  int64_t* out_ids;               // [num_rows]
  float* out_logprobs;            // [num_rows] or null: of the raw distribution, at least -9999
  int32_t* out_ranks;             // [num_rows] or null: 1 + number of larger raw logits
  int32_t* out_status;            // [num_rows]: 1 where a logit is NaN or +inf or all are -inf
  int32_t* out_top_ids;           // [num_rows, num_top] or null: largest raw logits, descending
  float* out_top_logprobs;        // [num_rows, num_top] or null
  int64_t num_rows, vocab_size, logits_stride;
  int32_t num_top;
  DType dtype;
};

// Raw log-probabilities of given tokens.
struct TokenLogprobsParams {
  const void* logits;       // [num_rows, vocab_size]
  const int64_t* ids;       // [num_rows]
  float* out_logprobs;      // [num_rows]
  int32_t* out_ranks;       // [num_rows]
  int32_t* out_status;      // [num_rows]
  int32_t* out_top_ids;     // [num_rows, num_top] or null
  float* out_top_logprobs;  // [num_rows, num_top] or null
  int64_t num_rows, vocab_size, logits_stride;
  int32_t num_top;
  DType dtype;
};

// Types of quantised weights in GGUF files, by their numbers there. A block is 32 weights.
enum class BlockType : int32_t { kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8 };

// Weights as float32, rounded as scale * number + minimum in float32.
struct DequantizeParams {
  float* out;          // [num_blocks * 32]
  const void* blocks;  // [num_blocks], not aligned
  int64_t num_blocks;
  BlockType type;
};

}  // namespace pagemill
