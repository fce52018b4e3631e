// Which instruction sets the kernels may use, decided once at run time.
#pragma once

#include <string_view>

namespace pagemill {

// Ordered: a level includes all levels below it.
enum class CpuIsa : int {
  kPortable = 0,
  kAvx2 = 1,        // AVX2, FMA, F16C
  kAvx512 = 2,      // AVX-512 F, BW, DQ, VL
  kAvx512Bf16 = 3,  // + AVX512_BF16
  kAmx = 4,         // + AMX-TILE, AMX-BF16, with the kernel's permission for tile data
};

// The best level of this processor and operating system, capped by $PAGEMILL_CPU_ISA (portable, avx2, avx512,
// avx512bf16, amx), whatever set_cpu_isa has chosen. Throws std::invalid_argument if the variable names no level.
CpuIsa best_cpu_isa();

// The level that kernels dispatch on: best_cpu_isa() unless set_cpu_isa lowered it.
CpuIsa cpu_isa();

// For tests and benchmarks. Throws std::invalid_argument for a level above best_cpu_isa().
void set_cpu_isa(CpuIsa isa);

std::string_view cpu_isa_name(CpuIsa isa);

// Throws std::invalid_argument that lists the known names.
CpuIsa parse_cpu_isa(std::string_view name);

}  // namespace pagemill
