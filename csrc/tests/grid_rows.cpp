// Norms, rotary embedding, activations, gathers, merged results, copied and swapped blocks.
#include <cstring>
#include <limits>
#include <utility>

#include "kernel_grid.h"
#include "pagemill/kernels.h"

namespace pagemill::test {
namespace {

void test_rms_norm(DType dtype, int64_t hidden, DType x_dtype, bool has_residual, DType residual_dtype) {
  constexpr int64_t kRows = 3;
  Numbers out(kRows * hidden, dtype), x(kRows * hidden, x_dtype), weight(hidden, dtype);
  Numbers residual(kRows * hidden, residual_dtype);
  x.fill(1);
  weight.fill(2);
  residual.fill(3);
  RmsNormParams p{};
  p.out = out.data();
  p.x = x.data();
  p.residual = has_residual ? residual.data() : nullptr;
  p.weight = weight.data();
  p.num_tokens = kRows;
  p.hidden = p.out_stride = p.x_stride = p.residual_stride = hidden;
  p.epsilon = 1e-5f;
  p.dtype = dtype;
  p.x_dtype = x_dtype;
  p.residual_dtype = residual_dtype;
  expect(pagemill_rms_norm(&p) == 0 && out.is_finite(), "rms_norm");
  for (int64_t row = 0; row < kRows; ++row) {
    double sum = 0;
    const auto input = [&](int64_t i) { return has_residual ? residual[row * hidden + i] : x[row * hidden + i]; };
    for (int64_t i = 0; i < hidden; ++i) sum += input(i) * input(i);
    const double scale = 1 / std::sqrt(sum / static_cast<double>(hidden) + 1e-5);
    for (int64_t i = 0; i < hidden; ++i) {
      expect(std::abs(out[row * hidden + i] - input(i) * scale * weight[i]) < 4 * tolerance(dtype), "rms_norm value");
    }
  }
}

void test_rotary(DType dtype, RotaryLayout layout, int32_t rot_dim, bool positions_are_int64, KvDType kv_dtype) {
  constexpr int64_t kTokens = 5, kHeads = 3, kKvHeads = 1, kSize = 80, kPositions = 7, kBlocks = 2;
  Numbers q(kTokens * kHeads * kSize, dtype), k(kTokens * kKvHeads * kSize, dtype);
  q.fill(1);
  k.fill(2);
  Buffer<int64_t> wide(kTokens), slots(kTokens);
  Buffer<int32_t> narrow(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) {
    wide[i] = narrow[i] = static_cast<int32_t>(kPositions - 1 - i);
    slots[i] = i == 2 ? -1 : kBlocks * 8 - 1 - i;
  }
  Buffer<float> cos_sin(kPositions * rot_dim);
  for (int64_t i = 0; i < cos_sin.size(); ++i) cos_sin[i] = i % rot_dim < rot_dim / 2 ? 1.0f : 0.0f;
  Buffer<uint8_t> key_cache(kBlocks * 8 * kSize * kv_bytes(kv_dtype, dtype)), value_cache(key_cache.size());
  RotaryParams r{};
  r.q = q.data();
  r.k = k.data();
  r.positions = positions_are_int64 ? static_cast<const void*>(wide.data()) : narrow.data();
  r.cos_sin = cos_sin.data();
  r.num_tokens = kTokens;
  r.max_positions = kPositions;
  r.q_token_stride = kHeads * kSize;
  r.k_token_stride = kKvHeads * kSize;
  r.q_head_stride = r.k_head_stride = kSize;
  r.num_query_heads = kHeads;
  r.num_kv_heads = kKvHeads;
  r.head_size = kSize;
  r.rot_dim = rot_dim;
  r.positions_are_int64 = positions_are_int64;
  r.layout = layout;
  r.dtype = dtype;
  StoreKvParams s{};
  s.key = s.value = k.data();
  s.key_cache = key_cache.data();
  s.value_cache = value_cache.data();
  s.slot_mapping = slots.data();
  s.num_tokens = kTokens;
  s.num_blocks = kBlocks;
  s.key_token_stride = s.value_token_stride = kKvHeads * kSize;
  s.key_head_stride = s.value_head_stride = s.head_size = kSize;
  s.num_kv_heads = kKvHeads;
  s.block_size = 8;
  s.dtype = dtype;
  s.kv_dtype = kv_dtype;
  expect(pagemill_rope_and_store(&r, &s) == 0, "rope_and_store status");
  // An angle of 0 changes nothing.
  for (int64_t i = 0; i < q.size(); ++i) expect(q[i] == static_cast<double>(eighth(i + 1)), "rotary value");
  if (kv_dtype == KvDType::kActivation) {
    const int64_t row_bytes = kSize * dtype_bytes(dtype);
    expect(std::memcmp(key_cache.data() + slots[0] * row_bytes, k.data(), static_cast<size_t>(row_bytes)) == 0,
           "stored key");
  }
  slots[0] = kBlocks * 8;
  expect(pagemill_rope_and_store(&r, &s) != 0, "slot outside the cache");
  narrow[0] = kPositions;
  wide[0] = -1;
  expect(pagemill_rotary(&r) != 0, "position outside the table");
}

void test_activation(DType dtype, Activation activation, int64_t size) {
  Numbers out(2 * size, dtype), gate_up(4 * size, dtype);
  gate_up.fill(1);
  ActivationParams p{out.data(), gate_up.data(), 2, size, size, 2 * size, activation, dtype};
  expect(pagemill_activation_and_mul(&p) == 0 && out.is_finite(), "activation");
}

void test_gather(DType dtype, bool ids_are_int64, bool is_widening) {
  constexpr int64_t kRows = 5, kTableRows = 3, kWidth = 19;
  Numbers table(kTableRows * kWidth, dtype), out(kRows * kWidth, is_widening ? DType::kFloat32 : dtype);
  table.fill(1);
  Buffer<int64_t> wide(kRows);
  Buffer<int32_t> narrow(kRows);
  for (int64_t i = 0; i < kRows; ++i) wide[i] = narrow[i] = static_cast<int32_t>(kTableRows - 1 - i % kTableRows);
  const int64_t row_bytes = kWidth * dtype_bytes(dtype);
  GatherRowsParams p{};
  p.out = out.data();
  p.table = table.data();
  p.ids = ids_are_int64 ? static_cast<const void*>(wide.data()) : narrow.data();
  p.num_rows = kRows;
  p.num_table_rows = kTableRows;
  p.row_bytes = p.table_stride_bytes = row_bytes;
  p.out_stride_bytes = is_widening ? kWidth * 4 : row_bytes;
  p.ids_are_int64 = ids_are_int64;
  p.is_widening = is_widening;
  p.dtype = dtype;
  expect(pagemill_gather_rows(&p) == 0, "gather_rows status");
  for (int64_t i = 0; i < out.size(); ++i) {
    expect(out[i] == table[wide[i / kWidth] * kWidth + i % kWidth], "gather_rows value");
  }
  wide[4] = narrow[4] = kTableRows;
  expect(pagemill_gather_rows(&p) != 0, "id outside the table");
}

void test_merge(DType dtype, int64_t head_size) {
  constexpr int64_t kRows = 4;
  Numbers a(kRows * head_size, dtype), b(kRows * head_size, dtype);
  a.fill(1);
  b.fill(2);
  Buffer<float> lse_a(kRows), lse_b(kRows);
  const float none = -std::numeric_limits<float>::infinity();
  lse_a[1] = lse_a[3] = lse_b[2] = lse_b[3] = none;
  for (int64_t i = 0; i < head_size; ++i) a.set(head_size + i, std::numeric_limits<float>::quiet_NaN());
  MergeAttentionParams p{b.data(),     lse_b.data(), a.data(),  lse_a.data(), b.data(),
                         lse_b.data(), kRows,        head_size, dtype};
  expect(pagemill_merge_attention(&p) == 0 && b.is_finite(), "merge_attention");
  for (int64_t i = 0; i < head_size; ++i) {
    const double mean = (static_cast<double>(eighth(i + 1)) + static_cast<double>(eighth(i + 2))) / 2;
    expect(std::abs(b[i] - mean) < tolerance(dtype), "merge_attention value");
    expect(b[head_size + i] == static_cast<double>(eighth(head_size + i + 2)), "merge_attention with an empty side");
    expect(b[3 * head_size + i] == 0.0, "merge_attention of nothing");
  }
  expect(std::abs(lse_b[0] - std::log(2.0f)) < 1e-6f && lse_b[3] == none, "merge_attention lse");
}

// Two rows of one and three tokens, an empty one between, and a token of padding.
void test_prepare_step() {
  constexpr int64_t kTokens = 5, kSeqs = 3, kSlots = 2, kLength = 12, kBlocks = 2;
  constexpr int32_t kBlockSize = 8;
  Buffer<int32_t> ids(kTokens), positions(kTokens), history(kSlots * kLength), blocks(kSlots * kBlocks);
  Buffer<int32_t> slots(kSeqs), start(kSeqs + 1), lens(kSeqs);
  Buffer<int64_t> mapping(kTokens);
  for (int32_t i = 0; i < kSlots * kLength; ++i) history[i] = 100 + i;
  for (int32_t i = 0; i < kSlots * kBlocks; ++i) blocks[i] = 7 - i;
  slots[0] = 1;
  slots[1] = 9;
  start[1] = start[2] = 1;
  start[3] = 4;
  lens[0] = 12;
  lens[2] = 9;
  PrepareStepParams p{ids.data(),   positions.data(), mapping.data(), history.data(), blocks.data(), slots.data(),
                      start.data(), lens.data(),      kTokens,        kSeqs,          kSlots,        kLength,
                      kBlocks,      kLength,          kBlocks,        kBlockSize};
  expect(pagemill_prepare_step(&p) == 0, "prepare_step");
  const int32_t expected[kTokens][3] = {{123, 11, 35}, {106, 6, 62}, {107, 7, 63}, {108, 8, 48}, {0, 0, -1}};
  for (int64_t t = 0; t < kTokens; ++t) {
    expect(ids[t] == expected[t][0] && positions[t] == expected[t][1] && mapping[t] == expected[t][2],
           "prepare_step value");
  }
  lens[2] = 13;
  expect(pagemill_prepare_step(&p) != 0 && std::strstr(pagemill_last_error(), "context_lens[2] is 13"),
         "prepare_step refuses a position");
}

void test_scatter(bool values_are_int64) {
  Buffer<int32_t> target(3), narrow(3);
  Buffer<int64_t> indices(3), wide(3);
  for (int32_t i = 0; i < 3; ++i) narrow[i] = 5 + i, wide[i] = 5 + i;
  indices[0] = 2;
  indices[1] = -1;
  ScatterParams p{target.data(), indices.data(), narrow.data(), 3, 3, values_are_int64};
  if (values_are_int64) p.values = wide.data();
  expect(pagemill_scatter(&p) == 0 && target[0] == 7 && target[1] == 0 && target[2] == 5, "scatter");
  indices[0] = 3;
  expect(pagemill_scatter(&p) != 0 && std::strstr(pagemill_last_error(), "indices[0] is 3"), "scatter refuses");
}

}  // namespace

void test_rows() {
  for (const DType dtype : kDTypes) {
    for (const int64_t hidden : {1, 16, 37, 64}) {
      for (const DType x_dtype : {dtype, DType::kFloat32}) {
        test_rms_norm(dtype, hidden, x_dtype, false, x_dtype);
        for (const DType residual_dtype : {x_dtype, DType::kFloat32}) {
          test_rms_norm(dtype, hidden, x_dtype, true, residual_dtype);
        }
      }
    }
    for (const RotaryLayout layout : {RotaryLayout::kNeox, RotaryLayout::kInterleaved}) {
      for (const int32_t rot_dim : {2, 20, 64, 80}) {
        for (const KvDType kv_dtype : kKvDTypes) test_rotary(dtype, layout, rot_dim, rot_dim != 20, kv_dtype);
      }
    }
    for (const Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kGeluErf}) {
      for (const int64_t size : {1, 16, 29}) test_activation(dtype, activation, size);
    }
    for (const bool ids_are_int64 : {false, true}) {
      for (const bool is_widening : {false, true}) test_gather(dtype, ids_are_int64, is_widening);
    }
    for (const int64_t head_size : {64, 80, 7}) test_merge(dtype, head_size);
  }
  test_prepare_step();
  for (const bool values_are_int64 : {false, true}) test_scatter(values_are_int64);
}

void test_blocks() {
  constexpr int64_t kBlocks = 4, kHostBlocks = 3, kBytes = 72;
  Buffer<uint8_t> key(kBlocks * kBytes), value(kBlocks * kBytes);
  Buffer<uint8_t> host_key(kHostBlocks * kBytes), host_value(kHostBlocks * kBytes);
  for (int64_t i = 0; i < key.size(); ++i) key[i] = value[i] = static_cast<uint8_t>(i);
  void* const caches[] = {key.data(), value.data()};
  void* const host_caches[] = {host_key.data(), host_value.data()};
  const auto same = [&](const uint8_t* a, const uint8_t* b) { return std::memcmp(a, b, kBytes) == 0; };

  Buffer<int64_t> sources(2), destinations(2);
  sources[0] = 3;
  destinations[0] = sources[1] = 1;
  destinations[1] = 0;
  CopyBlocksParams copy{caches, sources.data(), destinations.data(), 2, 2, kBlocks, kBytes};
  expect(pagemill_copy_blocks(&copy) == 0 && same(key.data(), key.data() + 3 * kBytes), "copy_blocks in order");
  sources[0] = kBlocks;
  expect(pagemill_copy_blocks(&copy) != 0 && std::strstr(pagemill_last_error(), "sources[0] is 4"),
         "copy_blocks refuses");

  Buffer<int64_t> blocks(2), host_blocks(2);
  blocks[0] = 2;
  host_blocks[0] = 2;
  blocks[1] = 3;
  host_blocks[1] = 0;
  SwapBlocksParams swap{caches,  host_caches, blocks.data(), host_blocks.data(),    2, 2,
                        kBlocks, kHostBlocks, kBytes,        SwapDirection::kToHost};
  expect(pagemill_swap_blocks(&swap) == 0, "swap_blocks to host");
  expect(
      same(host_key.data() + 2 * kBytes, key.data() + 2 * kBytes) && same(host_value.data(), value.data() + 3 * kBytes),
      "swap_blocks to host");
  swap.direction = SwapDirection::kToDevice;
  std::swap(blocks[0], blocks[1]);
  expect(pagemill_swap_blocks(&swap) == 0 && same(key.data() + 3 * kBytes, host_key.data() + 2 * kBytes),
         "swap_blocks from host");
  host_blocks[1] = kHostBlocks;
  expect(pagemill_swap_blocks(&swap) != 0 && std::strstr(pagemill_last_error(), "host_blocks[1] is 3"),
         "swap_blocks refuses a host block");
  blocks[0] = -1;
  expect(pagemill_swap_blocks(&swap) != 0 && std::strstr(pagemill_last_error(), "blocks[0] is -1"),
         "swap_blocks refuses a block");
  swap.direction = static_cast<SwapDirection>(2);
  expect(pagemill_swap_blocks(&swap) != 0 && std::strstr(pagemill_last_error(), "direction 2"),
         "swap_blocks refuses a direction");
}

}  // namespace pagemill::test
