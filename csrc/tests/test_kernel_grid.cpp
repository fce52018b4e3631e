#include "kernel_grid.h"

#include <cstdio>

#include "pagemill/cpu_features.h"

namespace pagemill::test {
namespace {
int failures = 0;
}

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: failed on %s\n", what, cpu_isa_name(cpu_isa()).data());
  ++failures;
}

int num_failures() { return failures; }

}  // namespace pagemill::test

int main() {
  using namespace pagemill;
  for (int level = 0; level <= static_cast<int>(best_cpu_isa()); ++level) {
    set_cpu_isa(static_cast<CpuIsa>(level));
    test::test_attention();
    test::test_attention_options();
    test::test_attention_refuses();
    test::test_rows();
    test::test_blocks();
    test::test_sampling();
    test::test_dequantize();
    test::test_linear();
    test::test_program();
  }
  std::printf("%d failed\n", test::num_failures());
  return test::num_failures() == 0 ? 0 : 1;
}
