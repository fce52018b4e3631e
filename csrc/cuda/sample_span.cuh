// What a block reads of a row in one go, held in registers.
#pragma once

#include "sample_block.cuh"

namespace pagemill::cuda::sampling {

constexpr int kEntriesOfThread = 64;
constexpr int kSpanEntries = kThreads * kEntriesOfThread;  // at most

template <typename T>
struct PairOf {
  using Type = __half2;
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00u;
};
template <>
struct PairOf<BFloat16> {
  using Type = __nv_bfloat162;
  static constexpr uint32_t kMinusInfinity = 0xff80ff80u;
};
template <>
struct PairOf<float> {
  static constexpr uint32_t kMinusInfinity = 0xff800000u;
};

// The larger number; NaN where one is.
__device__ __forceinline__ float larger_or_nan(float a, float b) { return a != a || b < a ? a : b; }

// What a thread holds of a span: entries of consecutive packs of the block, one of a pack's every kThreads, and where
// the row does not begin or end with a whole pack, one of the others.
template <typename T>
class SpanEntries {
 public:
  static constexpr int kCount = kPackOf<T>, kPacks = kEntriesOfThread / kCount;

  __device__ __forceinline__ void load(const T* row, int32_t vocab_size, int32_t span, int32_t num_spans) {
    const auto past = static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) % kAccessBytes / sizeof(T));
    const int32_t head = min(past == 0 ? 0 : kCount - past, vocab_size);
    const int32_t num_packs = (vocab_size - head) / kCount;
    const int32_t packs_of_span = divide_up(num_packs, num_spans);
    const int32_t first = span * packs_of_span, end = min(first + packs_of_span, num_packs);
    first_id_ = head + (first + static_cast<int32_t>(threadIdx.x)) * kCount;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int32_t i = first + j * kThreads + static_cast<int32_t>(threadIdx.x);
      if (i < end) {
        packs_[j] = load_pack<kCount>(row + head + static_cast<int64_t>(i) * kCount);
      } else {
#pragma unroll
        for (auto& word : packs_[j].words) word = PairOf<T>::kMinusInfinity;
      }
    }
    load_other(row, vocab_size, head, head + num_packs * kCount, span, num_spans);
  }

  // NaN where an entry is NaN or +inf.
  __device__ __forceinline__ float largest() const {
    float largest = -kInfinity;
    if constexpr (sizeof(T) == 4) {
      // Any NaN or infinity makes this NaN; only then are the entries looked at one by one (-inf is no fault).
      float suspect = 0.0f;
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const Floats<kCount> x = to_floats(packs_[j]);
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          largest = fmaxf(largest, x.values[e]);
          suspect = fmaf(x.values[e], 0.0f, suspect);
        }
      }
      if (suspect != suspect && has_bad_entry()) return kNotANumber;
    } else {
      largest = largest_of_words([&](auto larger) {
        uint32_t all = PairOf<T>::kMinusInfinity;
#pragma unroll
        for (int j = 0; j < kPacks; ++j) {
#pragma unroll
          for (const uint32_t word : packs_[j].words) all = larger(all, word);
        }
        return all;
      });
    }
    largest = larger_or_nan(largest, other_);
    return largest < kInfinity ? largest : kNotANumber;
  }

  // Calls visit(entry, id) for those that are not less than a finite threshold.
  template <typename Visit>
  __device__ __forceinline__ void for_each_from(float threshold, Visit visit) const {
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      if (!(largest_of_pack(packs_[j]) >= threshold)) continue;
      const Floats<kCount> x = to_floats(packs_[j]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (x.values[e] >= threshold) visit(x.values[e], first_id_ + j * kThreads * kCount + e);
      }
    }
    if (other_ >= threshold) visit(other_, other_id_);
  }

 private:
  static constexpr float kNotANumber = __builtin_nanf("");

  __device__ __forceinline__ void load_other(const T* row, int32_t vocab_size, int32_t head, int32_t tail, int32_t span,
                                             int32_t num_spans) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    other_id_ = -1;
    if (span == 0 && thread < head) other_id_ = thread;
    if (span == num_spans - 1 && thread >= kCount && thread - kCount < vocab_size - tail) {
      other_id_ = tail + thread - kCount;
    }
    other_ = other_id_ < 0 ? -kInfinity : to_float(row[other_id_]);
  }

  __device__ __forceinline__ bool has_bad_entry() const {
    bool is_bad = false;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const Floats<kCount> x = to_floats(packs_[j]);
#pragma unroll
      for (int e = 0; e < kCount; ++e) is_bad |= !(x.values[e] < kInfinity);
    }
    return is_bad;
  }

  // largest_in(larger): the larger numbers of words, pair by pair, combined by larger(word, word).
  template <typename LargestIn>
  __device__ __forceinline__ static float largest_of_words(LargestIn largest_in) {
    using Pair = typename PairOf<T>::Type;
    const uint32_t word = largest_in([](uint32_t a, uint32_t b) {
      Pair pair_a, pair_b;
      memcpy(&pair_a, &a, sizeof(a));
      memcpy(&pair_b, &b, sizeof(b));
      const Pair larger = __hmax2_nan(pair_a, pair_b);
      uint32_t bits;
      memcpy(&bits, &larger, sizeof(bits));
      return bits;
    });
    const Floats<2> pair = to_floats(Pack<T, 2>{{word}});
    return larger_or_nan(pair.values[0], pair.values[1]);
  }

  __device__ __forceinline__ static float largest_of_pack(const Pack<T, kCount>& pack) {
    if constexpr (sizeof(T) == 4) {
      const Floats<kCount> x = to_floats(pack);
      return fmaxf(fmaxf(x.values[0], x.values[1]), fmaxf(x.values[2], x.values[3]));
    } else {
      return largest_of_words([&](auto larger) {
        return larger(larger(pack.words[0], pack.words[1]), larger(pack.words[2], pack.words[3]));
      });
    }
  }

  Pack<T, kCount> packs_[kPacks];
  float other_;
  int32_t first_id_, other_id_;
};

}  // namespace pagemill::cuda::sampling
