// Numbers of an 8-bit KV cache: how they are made and read, for the instruction set of the including file.
#pragma once

#include "simd.h"

namespace pagemill {
namespace {

struct Fp8E4M3 {
  uint8_t bits;
};
struct Fp8E5M2 {
  uint8_t bits;
};

// Both formats are sign, exponent, mantissa, with exponents that bfloat16 holds too: a number becomes bfloat16 by
// moving its bits and adding to its exponent. What that gets wrong is listed here.
template <typename T>
struct Fp8Traits;

template <>
struct Fp8Traits<Fp8E4M3> {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr int kFirstSpecial = 0x7f;  // NaN; there is no infinity
  static constexpr float kLargest = 448.0f;
};

template <>
struct Fp8Traits<Fp8E5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr int kFirstSpecial = 0x7c;  // infinity, then NaN
  static constexpr float kLargest = 57344.0f;
};

// Rounded to nearest even; beyond the largest finite number: that number. NaN stays NaN.
template <typename T>
PAGEMILL_INLINE T to_fp8(float x) {
  using Traits = Fp8Traits<T>;
  constexpr int kShift = 23 - Traits::kMantissaBits;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - Traits::kBias) << 23;
  const uint32_t bits = float_to_bits(x);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fu};
  if (magnitude >= float_to_bits(Traits::kLargest)) {
    return {static_cast<uint8_t>(sign | (Traits::kFirstSpecial - 1))};
  }
  if (magnitude < kSmallestNormal) {
    // Adding a number whose last bit is worth the smallest subnormal leaves the rounded one in the low bits.
    constexpr uint32_t kAddend = static_cast<uint32_t>(151 - Traits::kBias - Traits::kMantissaBits) << 23;
    const float shifted = bits_to_float(magnitude) + bits_to_float(kAddend);
    return {static_cast<uint8_t>(sign | (float_to_bits(shifted) - kAddend))};
  }
  const uint32_t rounded = magnitude + ((1u << (kShift - 1)) - 1) + (magnitude >> kShift & 1u);
  return {static_cast<uint8_t>(sign | ((rounded - (kSmallestNormal - (1u << 23))) >> kShift))};
}

template <typename T>
constexpr float fp8_value(int bits) {
  using Traits = Fp8Traits<T>;
  const int magnitude = bits & 0x7f;
  const int exponent = magnitude >> Traits::kMantissaBits;
  const int mantissa = magnitude & ((1 << Traits::kMantissaBits) - 1);
  float value = static_cast<float>(exponent == 0 ? mantissa : mantissa + (1 << Traits::kMantissaBits));
  if (magnitude >= Traits::kFirstSpecial) {
    value = mantissa == 0 && Traits::kMantissaBits == 2 ? __builtin_inff() : __builtin_nanf("");
  }
  const int power = (exponent == 0 ? 1 : exponent) - Traits::kBias - Traits::kMantissaBits;
  for (int i = 0; i < power; ++i) value *= 2.0f;
  for (int i = 0; i > power; --i) value *= 0.5f;
  return (bits & 0x80) != 0 ? -value : value;
}

template <typename T>
struct Fp8Table {
  float values[256];
  constexpr Fp8Table() : values() {
    for (int bits = 0; bits < 256; ++bits) values[bits] = fp8_value<T>(bits);
  }
};
template <typename T>
constexpr Fp8Table<T> kFp8Table{};

PAGEMILL_INLINE float to_float(Fp8E4M3 x) { return kFp8Table<Fp8E4M3>.values[x.bits]; }
PAGEMILL_INLINE float to_float(Fp8E5M2 x) { return kFp8Table<Fp8E5M2>.values[x.bits]; }

template <typename T>
PAGEMILL_INLINE VecF load_fp8(const T* p) {
  float lanes[VecF::kWidth];
  for (int i = 0; i < VecF::kWidth; ++i) lanes[i] = to_float(p[i]);
  return load(lanes);
}
#if defined(__AVX2__)
PAGEMILL_INLINE VecF load(const Fp8E4M3* p) { return load_fp8(p); }
PAGEMILL_INLINE VecF load(const Fp8E5M2* p) { return load_fp8(p); }
#endif

#if defined(__AVX512BW__)

// Thirty-two numbers of a cache row as bfloat16, of which a mask says which exist; the others are zero.
PAGEMILL_INLINE __m512i load_bf16(const BFloat16* p) { return _mm512_loadu_si512(p); }
PAGEMILL_INLINE __m512i load_bf16(const BFloat16* p, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, p); }

template <typename T>
PAGEMILL_INLINE __m512i fp8_to_bf16(__m256i bytes) {
  using Traits = Fp8Traits<T>;
  constexpr int kShift = 7 - Traits::kMantissaBits;
  constexpr int kExponentMask = 0x7f & ~((1 << Traits::kMantissaBits) - 1);
  alignas(64) static constexpr struct Subnormals {
    uint16_t bits[32];
    constexpr Subnormals() : bits() {
      for (int i = 1; i < 1 << Traits::kMantissaBits; ++i) {
        bits[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, fp8_value<T>(i)) >> 16);
      }
    }
  } kSubnormals{};
  const __m512i bias = _mm512_set1_epi16(static_cast<int16_t>((127 - Traits::kBias) << 7));
  const __m512i wide = _mm512_cvtepi8_epi16(bytes);
  __m512i moved = _mm512_and_si512(_mm512_slli_epi16(wide, kShift), _mm512_set1_epi16(0x7f << kShift));
  const __mmask32 special =
      _mm512_cmpge_epu16_mask(moved, _mm512_set1_epi16(static_cast<int16_t>(Traits::kFirstSpecial << kShift)));
  const __mmask32 subnormal = _mm512_testn_epi16_mask(wide, _mm512_set1_epi16(kExponentMask));
  moved = _mm512_add_epi16(moved, bias);
  // A second bias takes the exponent of infinity and NaN to all ones.
  moved = _mm512_mask_add_epi16(moved, special, moved, bias);
  moved = _mm512_mask_permutexvar_epi16(moved, subnormal, wide, _mm512_load_si512(kSubnormals.bits));
  // moved | (wide & sign)
  return _mm512_ternarylogic_epi64(moved, wide, _mm512_set1_epi16(static_cast<int16_t>(0x8000)), 0xf8);
}

template <typename T>
PAGEMILL_INLINE __m512i load_bf16(const T* p) {
  return fp8_to_bf16<T>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <typename T>
PAGEMILL_INLINE __m512i load_bf16(const T* p, __mmask32 mask) {
  return fp8_to_bf16<T>(_mm256_maskz_loadu_epi8(mask, p));
}

#endif

}  // namespace
}  // namespace pagemill
