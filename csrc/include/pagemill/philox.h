// Philox 4x32-10: a counter-based generator, so a draw depends on its key and counter alone. For host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PAGEMILL_HOST_DEVICE __host__ __device__
#else
#define PAGEMILL_HOST_DEVICE
#endif

namespace pagemill {

struct PhiloxWords {
  uint32_t words[4];
};

PAGEMILL_HOST_DEVICE constexpr PhiloxWords philox4x32(PhiloxWords counter, uint32_t key_low, uint32_t key_high) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * counter.words[0];
    const uint64_t second = uint64_t{0xCD9E8D57u} * counter.words[2];
    counter = {{static_cast<uint32_t>(second >> 32) ^ counter.words[1] ^ key_low, static_cast<uint32_t>(second),
                static_cast<uint32_t>(first >> 32) ^ counter.words[3] ^ key_high, static_cast<uint32_t>(first)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1) with 53 random bits, for the token at `position` of the sequence with this seed.
PAGEMILL_HOST_DEVICE constexpr double uniform_draw(uint64_t seed, int64_t position) {
  const uint64_t counter = static_cast<uint64_t>(position);
  const PhiloxWords bits = philox4x32({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0}},
                                      static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t wide = (uint64_t{bits.words[1]} << 32) | bits.words[0];
  return static_cast<double>(wide >> 11) * 0x1p-53;
}

}  // namespace pagemill
