// The C interface without Python: every instruction set of this machine against plain loops in double.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "pagemill/cpu_features.h"
#include "pagemill/kernels.h"

namespace {

using namespace pagemill;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: failed on %s\n", what, cpu_isa_name(cpu_isa()).data());
  ++failures;
}

std::vector<float> numbers(size_t count, float step) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = std::sin(static_cast<float>(i) * step);
  return values;
}

void test_rms_norm() {
  constexpr int64_t kRows = 3, kHidden = 37;
  const auto x = numbers(kRows * kHidden, 0.7f), weight = numbers(kHidden, 0.3f);
  std::vector<float> out(kRows * kHidden);
  RmsNormParams p{};
  p.out = out.data();
  p.x = x.data();
  p.weight = weight.data();
  p.num_tokens = kRows;
  p.hidden = p.out_stride = p.x_stride = kHidden;
  p.epsilon = 1e-5f;
  expect(pagemill_rms_norm(&p) == 0, "rms_norm status");
  for (int64_t row = 0; row < kRows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < kHidden; ++i) sum += std::pow(static_cast<double>(x[row * kHidden + i]), 2);
    const double scale = 1 / std::sqrt(sum / kHidden + 1e-5);
    for (int64_t i = 0; i < kHidden; ++i) {
      const double expected = static_cast<double>(x[row * kHidden + i]) * scale * static_cast<double>(weight[i]);
      expect(std::abs(static_cast<double>(out[row * kHidden + i]) - expected) < 1e-5, "rms_norm value");
    }
  }
}

PagedAttentionParams attention_params(std::vector<float>& out, const std::vector<float>& query,
                                      const std::vector<float>& cache, const int32_t* table, const int32_t* start,
                                      const int32_t* lens) {
  PagedAttentionParams p{};
  p.out = out.data();
  p.query = query.data();
  p.key_cache = p.value_cache = cache.data();
  p.block_tables = table;
  p.query_start = start;
  p.context_lens = lens;
  p.num_tokens = p.num_table_rows = 1;
  p.num_blocks = 3;
  p.max_blocks = p.block_table_stride = 3;
  p.out_token_stride = p.out_head_stride = p.query_token_stride = p.query_head_stride = 64;
  p.num_seqs = p.num_query_heads = p.num_kv_heads = 1;
  p.head_size = 64;
  p.block_size = 8;
  p.window = -1;
  p.scale = 0.125f;
  return p;
}

void test_paged_attention() {
  constexpr int kContext = 20, kSize = 64;
  const auto cache = numbers(3 * 8 * kSize, 0.37f), query = numbers(kSize, 0.11f);
  std::vector<float> out(kSize);
  const int32_t table[] = {2, 0, 1}, start[] = {0, 1}, lens[] = {kContext};
  PagedAttentionParams p = attention_params(out, query, cache, table, start, lens);
  expect(pagemill_paged_attention(&p) == 0, "paged_attention status");
  std::vector<double> expected(kSize, 0.0);
  double sum = 0;
  for (int key = 0; key < kContext; ++key) {
    const float* row = cache.data() + (table[key / 8] * 8 + key % 8) * kSize;
    double score = 0;
    for (int d = 0; d < kSize; ++d) score += static_cast<double>(row[d]) * static_cast<double>(query[d]);
    const double weight = std::exp(score * 0.125);
    sum += weight;
    for (int d = 0; d < kSize; ++d) expected[d] += weight * static_cast<double>(row[d]);
  }
  for (int d = 0; d < kSize; ++d) {
    expect(std::abs(static_cast<double>(out[d]) - expected[d] / sum) < 1e-5, "paged_attention value");
  }
  const int32_t bad_table[] = {2, 0, 3};
  p.block_tables = bad_table;
  expect(pagemill_paged_attention(&p) != 0 && std::strstr(pagemill_last_error(), "block_tables") != nullptr,
         "paged_attention refuses a block outside the cache");
}

}  // namespace

int main() {
  const CpuIsa best = best_cpu_isa();
  for (int level = 0; level <= static_cast<int>(best); ++level) {
    set_cpu_isa(static_cast<CpuIsa>(level));
    test_rms_norm();
    test_paged_attention();
  }
  std::printf("%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}
