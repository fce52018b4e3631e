// One vector type per instruction set, so that a kernel body is written once and compiled per instruction set.
//
// Everything lives in an anonymous namespace: a function compiled for AVX-512 must never be the copy that the linker
// picks for code that runs on an older processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pagemill/params.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pagemill {
namespace {

#define PAGEMILL_INLINE inline __attribute__((always_inline))

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::kFloat16;
};

PAGEMILL_INLINE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
PAGEMILL_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

PAGEMILL_INLINE float to_float(float x) { return x; }
PAGEMILL_INLINE float to_float(BFloat16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
PAGEMILL_INLINE float to_float(Float16 x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Exponents are rebiased by a multiplication, which is exact for subnormal numbers too.
  const float scaled = bits_to_float(magnitude << 13) * 0x1p112f;
  return bits_to_float(float_to_bits(scaled) | sign);
}

template <typename T>
PAGEMILL_INLINE T from_float(float x);
template <>
PAGEMILL_INLINE float from_float<float>(float x) {
  return x;
}
template <>
PAGEMILL_INLINE BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
PAGEMILL_INLINE Float16 from_float<Float16>(float x) {
  const uint32_t bits = float_to_bits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the rounded subnormal in the low bits of the mantissa.
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

#if defined(__AVX512F__)

struct VecF {
  static constexpr int kWidth = 16;
  __m512 v;
};
PAGEMILL_INLINE VecF set1(float x) { return {_mm512_set1_ps(x)}; }
PAGEMILL_INLINE VecF operator+(VecF a, VecF b) { return {_mm512_add_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator-(VecF a, VecF b) { return {_mm512_sub_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator*(VecF a, VecF b) { return {_mm512_mul_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator/(VecF a, VecF b) { return {_mm512_div_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF fma(VecF a, VecF b, VecF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand where either is NaN, on every instruction set.
PAGEMILL_INLINE VecF max(VecF a, VecF b) { return {_mm512_max_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF min(VecF a, VecF b) { return {_mm512_min_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF round_nearest(VecF a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// a * 2^n for whole n in [-126, 128]
PAGEMILL_INLINE VecF scale_by_power(VecF a, VecF n) { return {_mm512_scalef_ps(a.v, n.v)}; }
PAGEMILL_INLINE bool any_greater(VecF a, VecF b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }
PAGEMILL_INLINE bool any_unordered(VecF a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
// Bit i: lane i of a is not less than b's; none is NaN.
PAGEMILL_INLINE uint32_t lanes_not_less(VecF a, VecF b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
// Rounded towards zero.
PAGEMILL_INLINE void store_whole(int32_t* p, VecF a) { _mm512_storeu_si512(p, _mm512_cvttps_epi32(a.v)); }
// a < b ? x : y in each lane
PAGEMILL_INLINE VecF select_less(VecF a, VecF b, VecF x, VecF y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
PAGEMILL_INLINE float reduce_add(VecF a) { return _mm512_reduce_add_ps(a.v); }
PAGEMILL_INLINE float reduce_max(VecF a) { return _mm512_reduce_max_ps(a.v); }
PAGEMILL_INLINE VecF load(const float* p) { return {_mm512_loadu_ps(p)}; }
PAGEMILL_INLINE VecF load(const BFloat16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
PAGEMILL_INLINE VecF load(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
PAGEMILL_INLINE void store(float* p, VecF a) { _mm512_storeu_ps(p, a.v); }
PAGEMILL_INLINE __m256i pack_bf16(__m512 a) {
  // AVX512_BF16's own conversion flushes subnormal numbers, which would make results depend on the processor.
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  rounded = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
PAGEMILL_INLINE void store(BFloat16* p, VecF a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_bf16(a.v)); }
PAGEMILL_INLINE void store(Float16* p, VecF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, 8));
}

#elif defined(__AVX2__)

struct VecF {
  static constexpr int kWidth = 8;
  __m256 v;
};
PAGEMILL_INLINE VecF set1(float x) { return {_mm256_set1_ps(x)}; }
PAGEMILL_INLINE VecF operator+(VecF a, VecF b) { return {_mm256_add_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator-(VecF a, VecF b) { return {_mm256_sub_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator*(VecF a, VecF b) { return {_mm256_mul_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF operator/(VecF a, VecF b) { return {_mm256_div_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF fma(VecF a, VecF b, VecF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
PAGEMILL_INLINE VecF max(VecF a, VecF b) { return {_mm256_max_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF min(VecF a, VecF b) { return {_mm256_min_ps(a.v, b.v)}; }
PAGEMILL_INLINE VecF round_nearest(VecF a) { return {_mm256_round_ps(a.v, 8)}; }
PAGEMILL_INLINE VecF scale_by_power(VecF a, VecF n) {
  // In two halves, so that results below the smallest normal number are right too.
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second))};
}
PAGEMILL_INLINE bool any_greater(VecF a, VecF b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)) != 0;
}
PAGEMILL_INLINE bool any_unordered(VecF a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)) != 0; }
PAGEMILL_INLINE uint32_t lanes_not_less(VecF a, VecF b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}
PAGEMILL_INLINE void store_whole(int32_t* p, VecF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvttps_epi32(a.v));
}
PAGEMILL_INLINE VecF select_less(VecF a, VecF b, VecF x, VecF y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
PAGEMILL_INLINE float reduce_add(VecF a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
PAGEMILL_INLINE float reduce_max(VecF a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
PAGEMILL_INLINE VecF load(const float* p) { return {_mm256_loadu_ps(p)}; }
PAGEMILL_INLINE VecF load(const BFloat16* p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
PAGEMILL_INLINE VecF load(const Float16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
PAGEMILL_INLINE void store(float* p, VecF a) { _mm256_storeu_ps(p, a.v); }
PAGEMILL_INLINE void store(BFloat16* p, VecF a) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
PAGEMILL_INLINE void store(Float16* p, VecF a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, 8));
}

#else

// Four lanes of plain C++; the compiler maps the loops to whatever the baseline has (SSE2, NEON).
struct VecF {
  static constexpr int kWidth = 4;
  float v[4];
};
template <typename Op>
PAGEMILL_INLINE VecF lanewise(Op op) {
  VecF r;
  for (int i = 0; i < VecF::kWidth; ++i) r.v[i] = op(i);
  return r;
}
PAGEMILL_INLINE VecF set1(float x) { return {{x, x, x, x}}; }
PAGEMILL_INLINE VecF operator+(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] + b.v[i]; });
}
PAGEMILL_INLINE VecF operator-(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] - b.v[i]; });
}
PAGEMILL_INLINE VecF operator*(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] * b.v[i]; });
}
PAGEMILL_INLINE VecF operator/(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] / b.v[i]; });
}
PAGEMILL_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return lanewise([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
PAGEMILL_INLINE VecF max(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
PAGEMILL_INLINE VecF min(VecF a, VecF b) {
  return lanewise([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
PAGEMILL_INLINE VecF round_nearest(VecF a) {
  // Adding and subtracting 1.5 * 2^23 rounds to even for |a| < 2^22, which holds for every exponent here.
  return lanewise([&](int i) { return (a.v[i] + 12582912.0f) - 12582912.0f; });
}
PAGEMILL_INLINE VecF scale_by_power(VecF a, VecF n) {
  return lanewise([&](int i) {
    const int32_t whole = static_cast<int32_t>(n.v[i]);
    const int32_t half = whole >> 1;
    return a.v[i] * bits_to_float(static_cast<uint32_t>(half + 127) << 23) *
           bits_to_float(static_cast<uint32_t>(whole - half + 127) << 23);
  });
}
PAGEMILL_INLINE bool any_greater(VecF a, VecF b) {
  bool any = false;
  for (int i = 0; i < VecF::kWidth; ++i) any |= a.v[i] > b.v[i];
  return any;
}
PAGEMILL_INLINE bool any_unordered(VecF a) {
  bool any = false;
  for (int i = 0; i < VecF::kWidth; ++i) any |= a.v[i] != a.v[i];
  return any;
}
PAGEMILL_INLINE uint32_t lanes_not_less(VecF a, VecF b) {
  uint32_t lanes = 0;
  for (int i = 0; i < VecF::kWidth; ++i) lanes |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
  return lanes;
}
PAGEMILL_INLINE void store_whole(int32_t* p, VecF a) {
  for (int i = 0; i < VecF::kWidth; ++i) p[i] = static_cast<int32_t>(a.v[i]);
}
PAGEMILL_INLINE VecF select_less(VecF a, VecF b, VecF x, VecF y) {
  return lanewise([&](int i) { return a.v[i] < b.v[i] ? x.v[i] : y.v[i]; });
}
PAGEMILL_INLINE float reduce_add(VecF a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
PAGEMILL_INLINE float reduce_max(VecF a) {
  float best = a.v[0];
  for (int i = 1; i < VecF::kWidth; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
template <typename T>
PAGEMILL_INLINE VecF load(const T* p) {
  return lanewise([&](int i) { return to_float(p[i]); });
}
template <typename T>
PAGEMILL_INLINE void store(T* p, VecF a) {
  for (int i = 0; i < VecF::kWidth; ++i) p[i] = from_float<T>(a.v[i]);
}

#endif

PAGEMILL_INLINE VecF zero() { return set1(0.0f); }

// The first n < kWidth elements; the others read as `fill`.
template <typename T>
PAGEMILL_INLINE VecF load_first(const T* p, int64_t n, float fill = 0.0f) {
  float buffer[VecF::kWidth];
  for (int i = 0; i < VecF::kWidth; ++i) buffer[i] = i < n ? to_float(p[i]) : fill;
  return load(buffer);
}
template <typename T>
PAGEMILL_INLINE void store_first(T* p, int64_t n, VecF a) {
  float buffer[VecF::kWidth];
  store(buffer, a);
  for (int64_t i = 0; i < n; ++i) p[i] = from_float<T>(buffer[i]);
}

// 2^x; relative error below 2e-7. Results below 2^-126 are 0: subnormal numbers cost a hundred cycles each, and masked
// scores would produce them in every block.
PAGEMILL_INLINE VecF exp2(VecF x) {
  const VecF bounded = max(set1(-126.0f), min(set1(128.0f), x));
  const VecF whole = round_nearest(bounded);
  const VecF f = bounded - whole;
  VecF p = set1(1.5403530e-4f);
  p = fma(p, f, set1(1.3333558e-3f));
  p = fma(p, f, set1(9.6181291e-3f));
  p = fma(p, f, set1(5.5504109e-2f));
  p = fma(p, f, set1(2.4022651e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  p = fma(p, f, set1(1.0f));
  return select_less(x, set1(-126.0f), zero(), scale_by_power(p, whole));
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// e^x, with the product x * log2(e) split so that large |x| keeps its precision; 0 below e^-87.3.
PAGEMILL_INLINE VecF exp(VecF x) {
  const VecF bounded = max(set1(-87.3f), min(set1(88.7f), x));
  const VecF whole = round_nearest(bounded * set1(kLog2E));
  VecF r = fma(whole, set1(-0.693145751953125f), bounded);
  r = fma(whole, set1(-1.428606765330187e-6f), r);
  VecF p = set1(1.3981999507e-3f);
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return select_less(x, set1(-87.3f), zero(), scale_by_power(p, whole));
}

PAGEMILL_INLINE VecF tanh(VecF x) {
  // 1 - 2 / (e^2x + 1); near zero that cancels, where the odd series is exact enough.
  const VecF bounded = max(set1(-10.0f), min(set1(10.0f), x));
  const VecF direct = set1(1.0f) - set1(2.0f) / (exp(bounded + bounded) + set1(1.0f));
  float lanes[VecF::kWidth], source[VecF::kWidth];
  store(lanes, direct);
  store(source, x);
  for (int i = 0; i < VecF::kWidth; ++i) {
    const float a = source[i];
    if (a > -0.1f && a < 0.1f) {
      const float s = a * a;
      lanes[i] = a * (1.0f + s * (-0.33333334f + s * (0.13333334f + s * -0.053968254f)));
    }
  }
  return load(lanes);
}

}  // namespace
}  // namespace pagemill
