// What the machine can do at best, as a yardstick beside measured products.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "linear_kernels.h"
#include "pagemill/thread_pool.h"

namespace pagemill {
namespace {

constexpr int64_t kProbeChunkBytes = 256 << 10;

uint64_t sum_words(const uint64_t* words, int64_t count) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

double probe_read_bandwidth(int64_t num_bytes, int repeats) {
  const int64_t num_chunks = std::max<int64_t>(1, num_bytes / kProbeChunkBytes);
  std::vector<uint64_t> buffer(static_cast<size_t>(num_chunks * kProbeChunkBytes / 8), 1);
  std::atomic<uint64_t> sink{0};
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto begin = std::chrono::steady_clock::now();
    parallel_for(num_chunks, [&](int64_t chunk, int) {
      const uint64_t* words = buffer.data() + chunk * kProbeChunkBytes / 8;
      sink.fetch_add(sum_words(words, kProbeChunkBytes / 8), std::memory_order_relaxed);
    });
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    best = std::max(best, static_cast<double>(num_chunks * kProbeChunkBytes) / elapsed.count());
  }
  return best;
}

double probe_bf16_peak() {
#if defined(PAGEMILL_HAVE_AMX)
  if (cpu_isa() == CpuIsa::kAmx) return peak_amx();
#endif
#if defined(PAGEMILL_HAVE_AVX512BF16)
  if (cpu_isa() >= CpuIsa::kAvx512Bf16) return peak_avx512bf16();
#endif
  return 0;
}

}  // namespace pagemill
