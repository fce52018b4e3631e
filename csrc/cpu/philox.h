// Philox 4x32-10: a counter-based generator, so a draw depends on its key and counter alone.
#pragma once

#include <array>
#include <cstdint>

namespace pagemill {

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
               static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1) with 53 random bits, for the token at `position` of the sequence with this seed.
constexpr double uniform_draw(uint64_t seed, int64_t position) {
  const uint64_t counter = static_cast<uint64_t>(position);
  const auto bits = philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0},
                               {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t wide = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<double>(wide >> 11) * 0x1p-53;
}

}  // namespace pagemill
