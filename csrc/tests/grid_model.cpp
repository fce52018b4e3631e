// Sampling, quantised weights, products with packed weights, and programs.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernel_grid.h"
#include "pagemill/kernels.h"
#include "pagemill/linear.h"
#include "pagemill/program.h"

namespace pagemill::test {
namespace {

// Row 0 is greedy, row 1 draws from the two largest, row 2 has every option, row 3 a NaN.
void test_sample(DType dtype, int64_t vocab) {
  constexpr int64_t kRows = 4;
  const int32_t num_top = 3;
  Numbers logits(kRows * vocab, dtype);
  logits.fill(1);
  logits.set(3 * vocab + vocab / 2, std::numeric_limits<float>::quiet_NaN());
  Buffer<float> temperature(kRows), top_p(kRows), min_p(kRows), presence(kRows), frequency(kRows), repetition(kRows);
  Buffer<int32_t> top_k(kRows), offsets(kRows + 1), ids(2), status(kRows), ranks(kRows), top_ids(kRows * num_top);
  Buffer<uint64_t> seeds(kRows);
  Buffer<int64_t> positions(kRows), out_ids(kRows);
  Buffer<float> bias(2), logprobs(kRows), top_logprobs(kRows * num_top);
  for (int64_t row = 0; row < kRows; ++row) {
    temperature[row] = row == 0 ? 0.0f : 0.8f;
    top_k[row] = row == 1 ? 2 : 0;
    top_p[row] = row == 2 ? 0.9f : 1.0f;
    min_p[row] = row == 2 ? 0.05f : 0.0f;
    presence[row] = frequency[row] = row == 2 ? 0.5f : 0.0f;
    repetition[row] = row == 2 ? 1.1f : 1.0f;
    offsets[row + 1] = row < 2 ? 0 : 2;
    seeds[row] = static_cast<uint64_t>(row);
    positions[row] = 10 + row;
  }
  ids[1] = static_cast<int32_t>(vocab - 1);
  bias[0] = 0.5f;
  SampleParams p{};
  p.logits = logits.data();
  p.temperature = temperature.data();
  p.top_k = top_k.data();
  p.top_p = top_p.data();
  p.min_p = min_p.data();
  p.seeds = seeds.data();
  p.positions = positions.data();
  p.presence_penalty = presence.data();
  p.frequency_penalty = frequency.data();
  p.repetition_penalty = repetition.data();
  p.prompt_offsets = p.output_offsets = p.bias_offsets = offsets.data();
  p.prompt_ids = p.output_ids = p.bias_ids = ids.data();
  p.bias_values = bias.data();
  p.out_ids = out_ids.data();
  p.out_logprobs = logprobs.data();
  p.out_ranks = ranks.data();
  p.out_status = status.data();
  p.out_top_ids = top_ids.data();
  p.out_top_logprobs = top_logprobs.data();
  p.num_rows = kRows;
  p.vocab_size = p.logits_stride = vocab;
  p.num_top = num_top;
  p.dtype = dtype;
  expect(pagemill_sample(&p) == 0, "sample status");
  for (int64_t row = 0; row < kRows; ++row) {
    expect(status[row] == (row == 3 ? 1 : 0), "sample row status");
    expect(out_ids[row] >= 0 && out_ids[row] < vocab, "sampled id");
  }
  expect(ranks[0] == 1, "rank of the largest logit");
  TokenLogprobsParams t{};
  t.logits = logits.data();
  t.ids = out_ids.data();
  t.out_logprobs = logprobs.data();
  t.out_ranks = ranks.data();
  t.out_status = status.data();
  t.out_top_ids = top_ids.data();
  t.out_top_logprobs = top_logprobs.data();
  t.num_rows = kRows;
  t.vocab_size = t.logits_stride = vocab;
  t.num_top = num_top;
  t.dtype = dtype;
  expect(pagemill_token_logprobs(&t) == 0 && ranks[0] == 1, "token_logprobs");
  out_ids[0] = vocab;
  expect(pagemill_token_logprobs(&t) != 0, "id outside the vocabulary");
  ids[1] = static_cast<int32_t>(vocab);
  expect(pagemill_sample(&p) != 0, "penalised id outside the vocabulary");
}

void test_linear_shape(DType dtype, int64_t out_features, int64_t in_features, int64_t rows, LinearEpilogue epilogue) {
  const bool is_gated = epilogue == LinearEpilogue::kSiluMul;
  const int64_t weight_rows = is_gated ? 2 * out_features : out_features;
  Numbers weight(weight_rows * in_features, dtype), x(rows * in_features, dtype), out(rows * out_features, dtype);
  Buffer<float> bias(weight_rows);
  weight.fill(1);
  x.fill(2);
  for (int64_t i = 0; i < weight_rows; ++i) bias[i] = eighth(i);
  const PackedLinear linear({weight.data(), weight_rows, in_features, in_features, dtype}, bias.data(),
                            is_gated ? WeightOrder::kGateUp : WeightOrder::kRows, cpu_isa());
  linear.apply({x.data(), rows, in_features, in_features, dtype}, {out.data(), rows, out_features, out_features, dtype},
               epilogue);
  expect(out.is_finite(), "linear");
  for (int64_t i = 0; i < out.size() && !is_gated; ++i) {
    double sum = static_cast<double>(bias[i % out_features]);
    for (int64_t k = 0; k < in_features; ++k) {
      sum += x[i / out_features * in_features + k] * weight[i % out_features * in_features + k];
    }
    expect(std::abs(out[i] - sum) <= tolerance(dtype) * std::max(1.0, std::abs(sum)), "linear value");
  }
  Numbers unpacked(weight_rows * in_features, dtype);
  linear.unpack(unpacked.data());
  expect(std::memcmp(unpacked.data(), weight.data(), static_cast<size_t>(weight.size() * dtype_bytes(dtype))) == 0,
         "unpacked weight");
}

// One layer of attention behind an embedding, run for a prompt and for one token more.
class TinyModel {
 public:
  static constexpr int64_t kTokens = 9, kHidden = 64, kVocab = 11, kWidth = 3 * 64, kBlocks = 2;

  TinyModel(DType dtype, KvDType kv_dtype)
      : table_(kVocab * kHidden, dtype),
        norm_(kHidden, dtype),
        weight_(kWidth * kHidden, dtype),
        residual_(kTokens * kHidden, DType::kFloat32),
        normed_(kTokens * kHidden, dtype),
        qkv_(kTokens * kWidth, dtype),
        out_(kTokens * 64, dtype),
        keys_(kBlocks * 8 * 64 * kv_bytes(kv_dtype, dtype)),
        values_(kBlocks * 8 * 64 * kv_bytes(kv_dtype, dtype)),
        linear_({weight_.fill(4).data(), kWidth, kHidden, kHidden, dtype}, nullptr, WeightOrder::kRows, cpu_isa()),
        program_(kTokens) {
    table_.fill(1);
    norm_.fill(2);
    GatherRowsParams embed{};
    embed.out = residual_.data();
    embed.table = table_.data();
    embed.num_table_rows = kVocab;
    embed.row_bytes = embed.table_stride_bytes = kHidden * dtype_bytes(dtype);
    embed.out_stride_bytes = kHidden * 4;
    embed.is_widening = true;
    embed.dtype = dtype;
    program_.add(embed);
    RmsNormParams norm{};
    norm.out = normed_.data();
    norm.x = residual_.data();
    norm.weight = norm_.data();
    norm.hidden = norm.out_stride = norm.x_stride = kHidden;
    norm.epsilon = 1e-5f;
    norm.dtype = dtype;
    norm.x_dtype = norm.residual_dtype = DType::kFloat32;
    program_.add(norm);
    program_.add(LinearCall{&linear_, normed_.data(), qkv_.data(), kHidden, kWidth, dtype, LinearEpilogue::kStore});
    add_attention(dtype, kv_dtype);
  }

  void run(int32_t first, int32_t count) {
    Buffer<int32_t> ids(count), positions(count), slots_of_seqs(1), table(kBlocks), start(2), lens(1);
    Buffer<int64_t> slots(count);
    Buffer<float> cos_sin(kTokens * 64);
    for (int64_t i = 0; i < cos_sin.size(); ++i) cos_sin[i] = i % 64 < 32 ? 1.0f : 0.0f;
    table[0] = 1;
    for (int32_t i = 0; i < count; ++i) {
      ids[i] = (first + i) % static_cast<int32_t>(kVocab);
      positions[i] = first + i;
      slots[i] = table[(first + i) / 8] * 8 + (first + i) % 8;
    }
    start[1] = count;
    lens[0] = first + count;
    StepInputs step{ids.data(),
                    positions.data(),
                    cos_sin.data(),
                    slots.data(),
                    table.data(),
                    slots_of_seqs.data(),
                    start.data(),
                    lens.data(),
                    count,
                    kTokens,
                    1,
                    kBlocks,
                    kBlocks,
                    1};
    program_.run(step, nullptr);
    expect(out_.is_finite(), "program");
    step.num_tokens = kTokens + 1;
    bool refused = false;
    try {
      program_.run(step, nullptr);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    expect(refused, "program refuses more tokens than its buffers hold");
  }

 private:
  void add_attention(DType dtype, KvDType kv_dtype) {
    char* qkv = static_cast<char*>(qkv_.data());
    const int64_t head_bytes = 64 * dtype_bytes(dtype);
    RopeAndStoreCall rope{};
    rope.rotary.q = qkv;
    rope.rotary.k = qkv + head_bytes;
    rope.rotary.q_token_stride = rope.rotary.k_token_stride = kWidth;
    rope.rotary.q_head_stride = rope.rotary.k_head_stride = 64;
    rope.rotary.num_query_heads = rope.rotary.num_kv_heads = 1;
    rope.rotary.head_size = rope.rotary.rot_dim = 64;
    rope.rotary.dtype = dtype;
    rope.store.key = qkv + head_bytes;
    rope.store.value = qkv + 2 * head_bytes;
    rope.store.key_cache = keys_.data();
    rope.store.value_cache = values_.data();
    rope.store.num_blocks = kBlocks;
    rope.store.key_token_stride = rope.store.value_token_stride = kWidth;
    rope.store.key_head_stride = rope.store.value_head_stride = rope.store.head_size = 64;
    rope.store.num_kv_heads = 1;
    rope.store.block_size = 8;
    rope.store.dtype = dtype;
    rope.store.kv_dtype = kv_dtype;
    program_.add(rope);
    PagedAttentionParams attention{};
    attention.out = out_.data();
    attention.query = qkv;
    attention.key_cache = keys_.data();
    attention.value_cache = values_.data();
    attention.num_blocks = kBlocks;
    attention.out_token_stride = attention.out_head_stride = attention.query_head_stride = attention.head_size = 64;
    attention.query_token_stride = kWidth;
    attention.num_query_heads = attention.num_kv_heads = 1;
    attention.block_size = 8;
    attention.window = -1;
    attention.scale = 0.125f;
    attention.dtype = dtype;
    attention.kv_dtype = kv_dtype;
    program_.add(attention);
  }

  Numbers table_, norm_, weight_, residual_, normed_, qkv_, out_;
  Buffer<uint8_t> keys_, values_;
  PackedLinear linear_;
  Program program_;
};

}  // namespace

void test_sampling() {
  for (const DType dtype : kDTypes) {
    for (const int64_t vocab : {3, 17, 1000}) test_sample(dtype, vocab);
  }
}

void test_dequantize() {
  constexpr int64_t kBlocks = 3;
  const std::pair<BlockType, int64_t> types[] = {{BlockType::kQ4_0, 18},
                                                 {BlockType::kQ4_1, 20},
                                                 {BlockType::kQ5_0, 22},
                                                 {BlockType::kQ5_1, 24},
                                                 {BlockType::kQ8_0, 34}};
  for (const auto& [type, block_bytes] : types) {
    Buffer<uint8_t> blocks(kBlocks * block_bytes + 1);  // read from the second byte on: blocks need no alignment
    for (int64_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 37 & 0x3b);
    Buffer<float> out(kBlocks * 32);
    const DequantizeParams p{out.data(), blocks.data() + 1, kBlocks, type};
    expect(pagemill_dequantize(&p) == 0, "dequantize");
    for (int64_t i = 0; i < out.size(); ++i) expect(std::isfinite(out[i]), "dequantized weight");
  }
  const DequantizeParams p{nullptr, nullptr, 0, static_cast<BlockType>(12)};
  expect(pagemill_dequantize(&p) != 0, "dequantize refuses a type");
}

void test_linear() {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 5, 33}) {
      test_linear_shape(dtype, 32, 64, rows, LinearEpilogue::kStore);
      test_linear_shape(dtype, 37, 51, rows, LinearEpilogue::kStore);
      test_linear_shape(dtype, 1, 1, rows, LinearEpilogue::kStore);
      test_linear_shape(dtype, 24, 48, rows, LinearEpilogue::kSiluMul);
    }
  }
}

void test_program() {
  for (const DType dtype : kDTypes) {
    for (const KvDType kv_dtype : kKvDTypes) {
      TinyModel model(dtype, kv_dtype);
      model.run(0, 7);
      model.run(7, 2);
    }
  }
}

}  // namespace pagemill::test
