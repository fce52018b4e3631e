// A block's slice of a row: loading, the adjustments of SampleParams, and walks over its entries.
#pragma once

#include "sample_block.cuh"

namespace pagemill::cuda::sampling {

// How rows are laid out over blocks, as chosen by the host.
struct Layout {
  int32_t slice_length;  // entries of a block, a multiple of kSlicePack
  float* workspace;  // where slices are not in shared memory: rows of slice_length; null: read the logits themselves
};

struct RawRow {
  const void* logits;
  DType dtype;
  int32_t vocab_size;
};

struct RowStats {
  float largest = -kInfinity;
  float smallest = kInfinity;  // above -inf, of some entries: how far values reach
  uint32_t is_bad = 0;         // a NaN or +inf was seen

  template <int kCount>
  __device__ __forceinline__ void see(const float (&x)[kCount]) {
    bool bad = is_bad != 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      largest = fmaxf(largest, x[i]);
      bad = bad | !(x[i] < kInfinity);
    }
    smallest = fminf(smallest, x[0] == -kInfinity ? kInfinity : x[0]);
    is_bad = bad ? 1u : 0u;
  }
  __device__ __forceinline__ bool is_valid() const { return is_bad == 0 && largest > -kInfinity; }
};
struct CombineStats {
  __device__ __forceinline__ RowStats operator()(const RowStats& a, const RowStats& b) const {
    return {fmaxf(a.largest, b.largest), fminf(a.smallest, b.smallest), a.is_bad | b.is_bad};
  }
};

constexpr int kLoadsInFlight = 8;  // of a thread, 16 bytes each

// A row of ids: entries begin .. end - 1 of a list.
struct IdRange {
  const int32_t* ids;
  int32_t begin, end;
};
// ends: null where a row's ids end where the next one's begin.
__device__ __forceinline__ IdRange row_ids(const int32_t* offsets, const int32_t* ends, const int32_t* ids,
                                           int64_t row) {
  if (offsets == nullptr) return {nullptr, 0, 0};
  return {ids, offsets[row], ends != nullptr ? ends[row] : offsets[row + 1]};
}

template <typename T>
__device__ __forceinline__ T row_value(const T* values, int64_t row, T otherwise) {
  return values != nullptr ? values[row] : otherwise;
}

// kResident: the entries are in shared memory, else in device memory.
template <bool kResident>
class Slice {
 public:
  __device__ __forceinline__ Slice(const RawRow& row, const Layout& layout, int64_t row_index, uint32_t rank)
      : begin_(static_cast<int32_t>(rank) * layout.slice_length) {
    count_ = min(max(row.vocab_size - begin_, 0), layout.slice_length);
    if (!kResident && layout.workspace != nullptr) entries_ = layout.workspace + row_index * layout.slice_length;
    has_own_memory_ = kResident || entries_ != nullptr;
  }

  __device__ __forceinline__ int32_t begin() const { return begin_; }
  __device__ __forceinline__ int32_t num_packs() const { return (count_ + kSlicePack - 1) / kSlicePack; }
  __device__ __forceinline__ float* entries() const { return kResident ? shared_slice() : entries_; }
  __device__ __forceinline__ float4 pack(int32_t i) const { return reinterpret_cast<const float4*>(entries())[i]; }
  // The entry's place in the slice, or -1.
  __device__ __forceinline__ int32_t place_of(int32_t id) const {
    const int32_t place = id - begin_;
    return place >= 0 && place < count_ ? place : -1;
  }

  // Reads the slice from the logits. The thread's part of the stats.
  __device__ RowStats load(const RawRow& row) {
    if (!kResident && entries_ == nullptr) entries_ = const_cast<float*>(static_cast<const float*>(row.logits));
    switch (row.dtype) {
      case DType::kFloat32:
        return load_as(static_cast<const float*>(row.logits));
      case DType::kBFloat16:
        return load_as(static_cast<const BFloat16*>(row.logits));
      case DType::kFloat16:
        break;
    }
    return load_as(static_cast<const Float16*>(row.logits));
  }

  __device__ RowStats stats() const {
    RowStats stats;
    for_each_pack<2>([&](const float (&x)[kSlicePack], int32_t) { stats.see(x); });
    return stats;
  }

  // Calls visit(entries, id of the first) for the thread's packs, the filling included (ids past the vocabulary, -inf).
  template <int kUnroll, typename Visit>
  __device__ __forceinline__ void for_each_pack(Visit visit) const {
    const int32_t packs = num_packs();
#pragma unroll kUnroll
    for (int32_t i = threadIdx.x; i < packs; i += kThreads) {
      const float4 x = pack(i);
      const float entries[kSlicePack] = {x.x, x.y, x.z, x.w};
      visit(entries, begin_ + i * kSlicePack);
    }
  }

  // The same, entry by entry: visit(entry, id).
  template <typename Visit>
  __device__ __forceinline__ void for_each(Visit visit) const {
    for_each_pack<2>([&](const float (&x)[kSlicePack], int32_t id) {
#pragma unroll
      for (int e = 0; e < kSlicePack; ++e) visit(x[e], id + e);
    });
  }

 private:
  template <typename T>
  __device__ __forceinline__ RowStats load_as(const T* logits) {
    constexpr int kCount = kPackOf<T>;
    const T* source = logits + begin_;
    RowStats stats;
    int32_t done = 0;
    if (reinterpret_cast<uintptr_t>(source) % kAccessBytes == 0) {
      const int32_t packs = count_ / kCount;
      for (int32_t first = threadIdx.x; first < packs; first += kLoadsInFlight * kThreads) {
        Pack<T, kCount> batch[kLoadsInFlight];
#pragma unroll
        for (int j = 0; j < kLoadsInFlight; ++j) {
          const int32_t i = first + j * kThreads;
          if (i < packs) batch[j] = load_pack<kCount>(source + i * kCount);
        }
#pragma unroll
        for (int j = 0; j < kLoadsInFlight; ++j) {
          const int32_t i = first + j * kThreads;
          if (i < packs) keep(i * kCount, batch[j], stats);
        }
      }
      done = packs * kCount;
    }
    for (int32_t i = done + threadIdx.x; i < num_packs() * kSlicePack; i += kThreads) {
      Pack<T, 1> one;
      const bool is_filling = i >= count_;
      if (!is_filling) one = load_pack<1>(source + i);
      const float x[1] = {is_filling ? -kInfinity : to_floats(one).values[0]};
      if (kResident || has_own_memory_) entries()[i] = x[0];
      stats.see(x);
    }
    return stats;
  }

  template <typename T, int kCount>
  __device__ __forceinline__ void keep(int32_t place, const Pack<T, kCount>& pack, RowStats& stats) {
    const Floats<kCount> wide = to_floats(pack);
    stats.see(wide.values);
#pragma unroll
    for (int e = 0; e < kCount; e += kSlicePack) {
      if (kResident || has_own_memory_) {
        reinterpret_cast<float4*>(entries())[(place + e) / kSlicePack] =
            make_float4(wide.values[e], wide.values[e + 1], wide.values[e + 2], wide.values[e + 3]);
      }
    }
  }

  int32_t begin_, count_;
  float* entries_ = nullptr;
  bool has_own_memory_;
};

__device__ __forceinline__ bool is_penalised(const SampleParams& p, int64_t row) {
  return row_value(p.presence_penalty, row, 0.0f) != 0.0f || row_value(p.frequency_penalty, row, 0.0f) != 0.0f ||
         row_value(p.repetition_penalty, row, 1.0f) != 1.0f;
}

__device__ __forceinline__ bool is_adjusted(const SampleParams& p, int64_t row) {
  return (p.bias_offsets != nullptr && p.bias_offsets[row] != p.bias_offsets[row + 1]) ||
         (p.masked_offsets != nullptr && p.masked_offsets[row] != p.masked_offsets[row + 1]) || is_penalised(p, row);
}

struct Penalties {
  float presence, frequency, repetition;

  __device__ __forceinline__ float apply(float logit, uint32_t occurrences) const {
    logit = logit > 0.0f ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    if (occurrences > 0) {
      logit = __fsub_rn(logit, __fadd_rn(presence, __fmul_rn(frequency, static_cast<float>(occurrences))));
    }
    return logit;
  }
};

// Calls visit(place) for the ids of the list that lie in the slice from `base` on, below base + width.
template <bool kResident, typename Visit>
__device__ __forceinline__ void for_each_id(const IdRange& list, const Slice<kResident>& slice, int32_t base,
                                            uint32_t width, Visit visit) {
#pragma unroll 4
  for (int32_t i = list.begin + threadIdx.x; i < list.end; i += kThreads) {
    const uint32_t place = static_cast<uint32_t>(slice.place_of(list.ids[i]) - base);
    if (place < width) visit(place);
  }
}

// Occurrences are counted in windows of as many entries as there is memory for, so that histories of any length need
// none of their own. Counter: an unsigned integer; its high bit: seen in the prompt, the others: occurrences in the
// output.
template <typename Counter, bool kResident>
__device__ __noinline__ void apply_penalties(const Penalties& penalties, const IdRange& prompt, const IdRange& output,
                                             const Slice<kResident>& slice) {
  constexpr int kPerWord = sizeof(uint32_t) / sizeof(Counter);
  constexpr int kBits = 8 * sizeof(Counter);
  constexpr uint32_t kInPrompt = 1u << (kBits - 1);
  constexpr int kWidth = kBuckets * kPerWord;
  auto& words = block_shared().counts;
  const auto in_word = [](uint32_t place, uint32_t value) { return value << (place % kPerWord * kBits); };
  for (int32_t base = 0; base < slice.num_packs() * kSlicePack; base += kWidth) {
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) words[i] = 0;
    __syncthreads();
    for_each_id(output, slice, base, kWidth,
                [&](uint32_t place) { atomicAdd(&block_shared().counts[place / kPerWord], in_word(place, 1u)); });
    for_each_id(prompt, slice, base, kWidth,
                [&](uint32_t place) { atomicOr(&block_shared().counts[place / kPerWord], in_word(place, kInPrompt)); });
    __syncthreads();
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) {
      if (words[i] == 0) continue;
#pragma unroll
      for (int j = 0; j < kPerWord; ++j) {
        const uint32_t count = static_cast<Counter>(words[i] >> (j * kBits));
        float& logit = slice.entries()[base + i * kPerWord + j];
        if (count != 0) logit = penalties.apply(logit, count & ~kInPrompt);
      }
    }
    __syncthreads();
  }
}

template <bool kResident>
__device__ __forceinline__ void penalise(const SampleParams& p, int64_t row, const Slice<kResident>& slice) {
  const Penalties penalties{row_value(p.presence_penalty, row, 0.0f), row_value(p.frequency_penalty, row, 0.0f),
                            row_value(p.repetition_penalty, row, 1.0f)};
  const IdRange prompt = row_ids(p.prompt_offsets, p.prompt_ends, p.prompt_ids, row);
  const IdRange output = row_ids(p.output_offsets, p.output_ends, p.output_ids, row);
  // What 15 bits can count takes half the walks.
  if (output.end - output.begin < 0x8000) {
    apply_penalties<uint16_t>(penalties, prompt, output, slice);
  } else {
    apply_penalties<uint32_t>(penalties, prompt, output, slice);
  }
}

// Logit bias, penalties and masked ids, in this order.
template <bool kResident>
__device__ void adjust(const SampleParams& p, int64_t row, Slice<kResident>& slice) {
  __syncthreads();
  const IdRange bias = row_ids(p.bias_offsets, nullptr, p.bias_ids, row);
  for (int32_t i = bias.begin + threadIdx.x; i < bias.end; i += kThreads) {
    const int32_t place = slice.place_of(bias.ids[i]);
    if (place >= 0) atomicAdd(slice.entries() + place, p.bias_values[i]);
  }
  __syncthreads();
  if (is_penalised(p, row)) penalise(p, row, slice);
  const IdRange masked = row_ids(p.masked_offsets, nullptr, p.masked_ids, row);
  for (int32_t i = masked.begin + threadIdx.x; i < masked.end; i += kThreads) {
    const int32_t place = slice.place_of(masked.ids[i]);
    if (place >= 0) slice.entries()[place] = -kInfinity;
  }
  __syncthreads();
}

}  // namespace pagemill::cuda::sampling
