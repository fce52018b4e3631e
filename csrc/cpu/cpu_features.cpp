#include "pagemill/cpu_features.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagemill {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"portable", "avx2", "avx512", "avx512bf16", "amx"};

#if defined(__x86_64__)

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuidLeaf regs;
  if (!__get_cpuid_count(leaf, subleaf, &regs.eax, &regs.ebx, &regs.ecx, &regs.edx)) return {};
  return regs;
}

bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

constexpr uint64_t bit(int index) { return uint64_t{1} << index; }

// Register state that the operating system saves and restores; an instruction set without it must not be used.
uint64_t enabled_state() {
  if (!has_bits(cpuid(1, 0).ecx, bit(27))) return 0;  // OSXSAVE
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

// Linux gives tile data (8 KB a thread) only to a process that asks; threads started later inherit the permission.
bool request_tile_permission() {
  constexpr int kArchReqXcompPerm = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

CpuIsa detect() {
  const uint64_t state = enabled_state();
  const CpuidLeaf basic = cpuid(1, 0);
  const CpuidLeaf extended = cpuid(7, 0);
  const CpuidLeaf extended1 = cpuid(7, 1);
  const bool avx2 = has_bits(state, bit(1) | bit(2)) &&
                    has_bits(basic.ecx, bit(28) | bit(12) | bit(29)) &&  // FMA, F16C
                    has_bits(extended.ebx, bit(5));
  if (!avx2) return CpuIsa::kPortable;
  const bool avx512 = has_bits(state, bit(5) | bit(6) | bit(7)) &&
                      has_bits(extended.ebx, bit(16) | bit(17) | bit(30) | bit(31));  // F, DQ, BW, VL
  if (!avx512) return CpuIsa::kAvx2;
  if (!has_bits(extended1.eax, bit(5))) return CpuIsa::kAvx512;
  const bool amx = has_bits(state, bit(17) | bit(18)) && has_bits(extended.edx, bit(22) | bit(24));
  if (!amx || !request_tile_permission()) return CpuIsa::kAvx512Bf16;
  return CpuIsa::kAmx;
}

#else

CpuIsa detect() { return CpuIsa::kPortable; }

#endif

CpuIsa detect_capped() {
  const CpuIsa detected = detect();
  const char* cap = std::getenv("PAGEMILL_CPU_ISA");
  if (cap == nullptr || *cap == '\0') return detected;
  try {
    return std::min(detected, parse_cpu_isa(cap));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("PAGEMILL_CPU_ISA: " + std::string(error.what()));
  }
}

std::atomic<int> chosen{-1};

}  // namespace

CpuIsa best_cpu_isa() {
  static const CpuIsa best = detect_capped();
  return best;
}

CpuIsa cpu_isa() {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa >= 0 ? static_cast<CpuIsa>(isa) : best_cpu_isa();
}

void set_cpu_isa(CpuIsa isa) {
  if (isa > best_cpu_isa()) {
    throw std::invalid_argument("this machine supports " + std::string(cpu_isa_name(best_cpu_isa())) +
                                " at best, not " + std::string(cpu_isa_name(isa)));
  }
  chosen.store(static_cast<int>(isa), std::memory_order_relaxed);
}

std::string_view cpu_isa_name(CpuIsa isa) { return kNames.at(static_cast<size_t>(isa)); }

CpuIsa parse_cpu_isa(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) {
    throw std::invalid_argument("unknown instruction set '" + std::string(name) +
                                "'; known are portable, avx2, avx512, avx512bf16, amx");
  }
  return static_cast<CpuIsa>(found - kNames.begin());
}

}  // namespace pagemill
