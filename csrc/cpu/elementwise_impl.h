// Norms, rotary embedding and activations, for the instruction set of the including file.
#pragma once

#include <type_traits>

#include "kernel_table.h"
#include "kv_format.h"

namespace pagemill {
namespace {

constexpr int W = VecF::kWidth;

template <typename T>
PAGEMILL_INLINE T* row_pointer(void* base, int64_t offset) {
  return static_cast<T*>(base) + offset;
}
template <typename T>
PAGEMILL_INLINE const T* row_pointer(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

// The sum of squares of the row.
template <typename X>
PAGEMILL_INLINE float sum_of_squares(const X* x, int64_t n) {
  const int64_t whole = n / W * W;
  VecF sum = zero();
  for (int64_t i = 0; i < whole; i += W) {
    const VecF value = load(x + i);
    sum = fma(value, value, sum);
  }
  if (whole != n) {
    const VecF value = load_first(x + whole, n - whole);
    sum = fma(value, value, sum);
  }
  return reduce_add(sum);
}

// residual += x. The sum of squares of what is stored: rounded, as the next layer sees it.
template <typename X, typename R>
PAGEMILL_INLINE float add_to_residual(R* residual, const X* x, int64_t n) {
  const int64_t whole = n / W * W;
  VecF sum = zero();
  for (int64_t i = 0; i < whole; i += W) {
    store(residual + i, load(residual + i) + load(x + i));
    const VecF value = load(residual + i);
    sum = fma(value, value, sum);
  }
  if (const int64_t rest = n - whole; rest != 0) {
    store_first(residual + whole, rest, load_first(residual + whole, rest) + load_first(x + whole, rest));
    const VecF value = load_first(residual + whole, rest);
    sum = fma(value, value, sum);
  }
  return reduce_add(sum);
}

template <typename X, typename T>
PAGEMILL_INLINE void scale_row(T* out, const X* x, const T* weight, int64_t n, float factor) {
  const int64_t whole = n / W * W;
  const VecF scale = set1(factor);
  for (int64_t i = 0; i < whole; i += W) store(out + i, load(x + i) * scale * load(weight + i));
  if (const int64_t rest = n - whole; rest != 0) {
    store_first(out + whole, rest, load_first(x + whole, rest) * scale * load_first(weight + whole, rest));
  }
}

// X: of x; R: of the residual; T: of out and weight.
template <typename X, typename R, typename T>
void rms_norm_rows_of(const RmsNormParams& p, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(p.weight);
  const auto scale_of = [&p](float squares) {
    return 1.0f / __builtin_sqrtf(squares / static_cast<float>(p.hidden) + p.epsilon);
  };
  for (int64_t row = begin; row < end; ++row) {
    const X* x = row_pointer<X>(p.x, row * p.x_stride);
    T* out = row_pointer<T>(p.out, row * p.out_stride);
    if (p.residual != nullptr) {
      R* residual = row_pointer<R>(p.residual, row * p.residual_stride);
      const float squares = add_to_residual(residual, x, p.hidden);
      scale_row(out, residual, weight, p.hidden, scale_of(squares));
    } else {
      scale_row(out, x, weight, p.hidden, scale_of(sum_of_squares(x, p.hidden)));
    }
  }
}

template <typename T>
PAGEMILL_INLINE void rotate_neox(T* head, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const VecF a = load(head + i), b = load(head + half + i);
    const VecF c = load(cosines + i), s = load(sines + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    head[i] = from_float<T>(a * cosines[i] - b * sines[i]);
    head[half + i] = from_float<T>(b * cosines[i] + a * sines[i]);
  }
}

template <typename T>
PAGEMILL_INLINE void rotate_interleaved(T* head, const float* cosines, const float* sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(head[2 * i]), b = to_float(head[2 * i + 1]);
    head[2 * i] = from_float<T>(a * cosines[i] - b * sines[i]);
    head[2 * i + 1] = from_float<T>(b * cosines[i] + a * sines[i]);
  }
}

template <typename T>
void rotary_rows_of(const RotaryParams& p, int64_t begin, int64_t end) {
  const int64_t half = p.rot_dim / 2;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t position = p.positions_are_int64 ? static_cast<const int64_t*>(p.positions)[token]
                                                   : static_cast<const int32_t*>(p.positions)[token];
    const float* cosines = p.cos_sin + position * p.rot_dim;
    const float* sines = cosines + half;
    T* q = row_pointer<T>(p.q, token * p.q_token_stride);
    T* k = row_pointer<T>(p.k, token * p.k_token_stride);
    const int32_t num_heads = p.num_query_heads + p.num_kv_heads;
    for (int32_t head = 0; head < num_heads; ++head) {
      T* x = head < p.num_query_heads ? q + head * p.q_head_stride : k + (head - p.num_query_heads) * p.k_head_stride;
      if (p.layout == RotaryLayout::kNeox) {
        rotate_neox(x, cosines, sines, half);
      } else {
        rotate_interleaved(x, cosines, sines, half);
      }
    }
  }
}

PAGEMILL_INLINE VecF silu(VecF x) { return x / (set1(1.0f) + exp(zero() - x)); }

PAGEMILL_INLINE VecF gelu_tanh(VecF x) {
  const VecF inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

PAGEMILL_INLINE VecF gelu_erf(VecF x) {
  float lanes[W];
  store(lanes, x);
  for (int i = 0; i < W; ++i) lanes[i] = 0.5f * lanes[i] * (1.0f + ::erff(lanes[i] * 0.70710678f));
  return load(lanes);
}

template <typename T, VecF (*kActivation)(VecF)>
void activation_rows_with(const ActivationParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = row_pointer<T>(p.gate_up, row * p.gate_up_stride);
    const T* up = gate + p.size;
    T* out = row_pointer<T>(p.out, row * p.out_stride);
    int64_t i = 0;
    for (; i + W <= p.size; i += W) store(out + i, kActivation(load(gate + i)) * load(up + i));
    const int64_t rest = p.size - i;
    if (rest != 0) store_first(out + i, rest, kActivation(load_first(gate + i, rest)) * load_first(up + i, rest));
  }
}

template <typename T>
void activation_rows_of(const ActivationParams& p, int64_t begin, int64_t end) {
  switch (p.activation) {
    case Activation::kSilu:
      return activation_rows_with<T, silu>(p, begin, end);
    case Activation::kGeluTanh:
      return activation_rows_with<T, gelu_tanh>(p, begin, end);
    case Activation::kGeluErf:
      return activation_rows_with<T, gelu_erf>(p, begin, end);
  }
}

// Calls the functor with a value of the element type of `dtype`.
template <typename Functor>
PAGEMILL_INLINE auto with_element_type(DType dtype, Functor functor) {
  switch (dtype) {
    case DType::kBFloat16:
      return functor(BFloat16{});
    case DType::kFloat16:
      return functor(Float16{});
    case DType::kFloat32:
      break;
  }
  return functor(float{});
}

// Weights of the two sides of one row, and the log of the denominator. A side that saw no key has no weight.
struct MergeWeights {
  float a, b, lse;
};

PAGEMILL_INLINE MergeWeights merge_weights(float lse_a, float lse_b) {
  constexpr float kNothing = -__builtin_inff();
  const float maximum = lse_a > lse_b ? lse_a : lse_b;
  if (maximum == kNothing) return {0.0f, 0.0f, kNothing};
  const float a = ::expf(lse_a - maximum), b = ::expf(lse_b - maximum);
  return {a / (a + b), b / (a + b), maximum + ::logf(a + b)};
}

template <typename T>
void merge_attention_rows_of(const MergeAttentionParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const MergeWeights weights = merge_weights(p.lse_a[row], p.lse_b[row]);
    const T* a = row_pointer<T>(p.a, row * p.head_size);
    const T* b = row_pointer<T>(p.b, row * p.head_size);
    T* out = row_pointer<T>(p.out, row * p.head_size);
    if (p.lse != nullptr) p.lse[row] = weights.lse;
    if (weights.a == 0.0f && weights.b == 0.0f) {
      for (int64_t i = 0; i < p.head_size; ++i) out[i] = from_float<T>(0.0f);
      continue;
    }
    // What a side holds that saw no key is not read.
    if (weights.b == 0.0f) b = a;
    if (weights.a == 0.0f) a = b;
    const VecF weight_a = set1(weights.a), weight_b = set1(weights.b);
    int64_t i = 0;
    for (; i + W <= p.head_size; i += W) store(out + i, fma(load(a + i), weight_a, load(b + i) * weight_b));
    const int64_t rest = p.head_size - i;
    if (rest != 0) {
      store_first(out + i, rest, fma(load_first(a + i, rest), weight_a, load_first(b + i, rest) * weight_b));
    }
  }
}

template <typename T, typename Kv>
PAGEMILL_INLINE void quantize_as(const T* x, int64_t n, float scale, Kv* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_fp8<Kv>(to_float(x[i]) / scale);
}

// Calls the functor with a value of the type of the cache's numbers.
template <typename T, typename Functor>
PAGEMILL_INLINE void with_kv_type(KvDType kv_dtype, Functor functor) {
  switch (kv_dtype) {
    case KvDType::kActivation:
      return functor(T{});
    case KvDType::kFp8E4M3:
      return functor(Fp8E4M3{});
    case KvDType::kFp8E5M2:
      return functor(Fp8E5M2{});
  }
}

void quantize_kv(const void* x, DType dtype, int64_t n, float scale, KvDType kv_dtype, void* out) {
  with_element_type(dtype, [&](auto element) {
    using T = decltype(element);
    with_kv_type<T>(kv_dtype, [&](auto number) {
      using Kv = decltype(number);
      if constexpr (!std::is_same_v<T, Kv>) quantize_as(static_cast<const T*>(x), n, scale, static_cast<Kv*>(out));
    });
  });
}

void merge_attention_rows(const MergeAttentionParams& p, int64_t begin, int64_t end) {
  with_element_type(p.dtype, [&](auto element) { merge_attention_rows_of<decltype(element)>(p, begin, end); });
}
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  with_element_type(p.dtype, [&](auto element) {
    using T = decltype(element);
    const bool has_wide_residual = p.residual != nullptr && p.residual_dtype == DType::kFloat32;
    if (p.x_dtype == DType::kFloat32) {
      rms_norm_rows_of<float, float, T>(p, begin, end);
    } else if (has_wide_residual) {
      rms_norm_rows_of<T, float, T>(p, begin, end);
    } else {
      rms_norm_rows_of<T, T, T>(p, begin, end);
    }
  });
}
void rotary_rows(const RotaryParams& p, int64_t begin, int64_t end) {
  with_element_type(p.dtype, [&](auto element) { rotary_rows_of<decltype(element)>(p, begin, end); });
}
void activation_rows(const ActivationParams& p, int64_t begin, int64_t end) {
  with_element_type(p.dtype, [&](auto element) { activation_rows_of<decltype(element)>(p, begin, end); });
}

}  // namespace
}  // namespace pagemill
