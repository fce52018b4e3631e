#include "kernel_table.h"

#include <cstdarg>
#include <cstdio>

#include "error.h"
#include "pagemill/cpu_features.h"
#include "pagemill/kernels.h"

namespace pagemill {
namespace {
thread_local char last_error[512] = "";
}

int fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, sizeof(last_error), format, arguments);
  va_end(arguments);
  return 1;
}

const KernelTable& kernel_table() {
  [[maybe_unused]] const CpuIsa isa = cpu_isa();
#if defined(PAGEMILL_HAVE_AMX)
  if (isa >= CpuIsa::kAmx) return kernel_table_amx();
#endif
#if defined(PAGEMILL_HAVE_AVX512BF16)
  if (isa >= CpuIsa::kAvx512Bf16) return kernel_table_avx512bf16();
#endif
#if defined(PAGEMILL_HAVE_AVX512)
  if (isa >= CpuIsa::kAvx512) return kernel_table_avx512();
#endif
#if defined(PAGEMILL_HAVE_AVX2)
  if (isa >= CpuIsa::kAvx2) return kernel_table_avx2();
#endif
  return kernel_table_portable();
}

}  // namespace pagemill

extern "C" const char* pagemill_last_error() { return pagemill::last_error; }
