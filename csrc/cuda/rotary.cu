// Rotary embedding, alone or with the storing of keys and values.
#include <algorithm>

#include "error.h"
#include "pagemill/cuda_kernels.h"
#include "store_kv.cuh"

namespace pagemill::cuda {
namespace {

// Of a block: few blocks are better large, many better small.
constexpr int kThreadsOfFew = 256;
constexpr int kThreadsOfMany = 128;
constexpr int kMaxThreads = 512;
constexpr int kHeadsInFlight = 2;

__device__ __forceinline__ void rotate_pair(float& a, float& b, float cosine, float sine) {
  // Products are rounded on their own, as on the CPU.
  const float rotated = __fsub_rn(__fmul_rn(a, cosine), __fmul_rn(b, sine));
  b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(a, sine));
  a = rotated;
}

// A unit is what one thread does of one head: two packs that are rotated with each other (neox: half of rot_dim apart,
// interleaved: neighbours), or, past rot_dim, two packs that are only stored.
template <typename T, RotaryLayout kLayout, int kCount>
struct Unit {
  int32_t first, second;  // elements from the start of the head; second == head_size: no second pack
  bool is_rotated;

  __device__ __forceinline__ Unit(const RotaryParams& p, int32_t unit) {
    const int32_t rotated_units = p.rot_dim / (2 * kCount);
    is_rotated = unit < rotated_units;
    if (is_rotated && kLayout == RotaryLayout::kNeox) {
      first = unit * kCount;
      second = first + p.rot_dim / 2;
    } else {
      first = unit * 2 * kCount;
      second = first + kCount;
    }
  }

  __device__ __forceinline__ void load_table(const float* cos_sin, int32_t rot_dim, float (&cosines)[kCount],
                                             float (&sines)[kCount]) const {
    if (!is_rotated) return;
    const float* table = cos_sin + (kLayout == RotaryLayout::kNeox ? first : first / 2);
    const auto c = to_floats(load_pack<kCount>(table)), s = to_floats(load_pack<kCount>(table + rot_dim / 2));
#pragma unroll
    for (int i = 0; i < kCount; ++i) cosines[i] = c.values[i], sines[i] = s.values[i];
  }

  __device__ __forceinline__ static void rotate(Pack<T, kCount>& a, Pack<T, kCount>& b, const float (&cosines)[kCount],
                                                const float (&sines)[kCount]) {
    Floats<kCount> first = to_floats(a), second = to_floats(b);
    const auto value = [&](int i) -> float& { return i < kCount ? first.values[i] : second.values[i - kCount]; };
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kLayout == RotaryLayout::kNeox) {
        rotate_pair(value(i), value(kCount + i), cosines[i], sines[i]);
      } else {
        rotate_pair(value(2 * i), value(2 * i + 1), cosines[i], sines[i]);
      }
    }
    a = to_pack<T>(first), b = to_pack<T>(second);
  }
};

// The heads of one token: query heads, key heads, then (with a cache) value heads.
struct RotateOnly {
  static constexpr bool kStores = false;
};
struct RotateAndStore {
  static constexpr bool kStores = true;
};

template <typename T, typename Policy>
struct Heads {
  const RotaryParams& rotary;
  const StoreKvParams& store;
  int64_t token;

  __device__ __forceinline__ int32_t count() const {
    return rotary.num_query_heads + rotary.num_kv_heads * (Policy::kStores ? 2 : 1);
  }
  __device__ __forceinline__ bool is_query(int32_t head) const { return head < rotary.num_query_heads; }
  __device__ __forceinline__ bool is_value(int32_t head) const {
    return Policy::kStores && head >= rotary.num_query_heads + rotary.num_kv_heads;
  }
  __device__ __forceinline__ T* address(int32_t head) const {
    if (is_query(head)) {
      return static_cast<T*>(rotary.q) + token * rotary.q_token_stride + head * rotary.q_head_stride;
    }
    head -= rotary.num_query_heads;
    if (!Policy::kStores || head < rotary.num_kv_heads) {
      return static_cast<T*>(rotary.k) + token * rotary.k_token_stride + head * rotary.k_head_stride;
    }
    head -= rotary.num_kv_heads;
    // Read only: value heads are never rotated.
    return const_cast<T*>(static_cast<const T*>(store.value)) + token * store.value_token_stride +
           head * store.value_head_stride;
  }
  template <int kCount>
  __device__ __forceinline__ void keep(int32_t head, int64_t slot, int32_t element, const Pack<T, kCount>& pack) const {
    const bool value = is_value(head);
    const int32_t kv_head = head - rotary.num_query_heads - (value ? rotary.num_kv_heads : 0);
    store_to_cache(store, value ? store.value_cache : store.key_cache, value ? store.value_scale : store.key_scale,
                   kv_head, slot + head_offset(store, kv_head) + element, pack);
  }
};

// One token to a block of units_per_head x heads_at_once threads: a thread keeps its sines and cosines over all heads.
// Heads are read before the position and the slot are known, so that their latencies overlap.
template <typename T, RotaryLayout kLayout, int kCount, typename Policy>
__global__ void __launch_bounds__(kMaxThreads)
    rotary_kernel(const __grid_constant__ RotaryParams rotary, const __grid_constant__ StoreKvParams store,
                  int32_t units_per_head, int32_t heads_at_once) {
  const Heads<T, Policy> heads{rotary, store, static_cast<int64_t>(blockIdx.x)};
  const int32_t first_head = threadIdx.x / units_per_head;
  if (first_head >= heads_at_once) return;
  const Unit<T, kLayout, kCount> unit(rotary, threadIdx.x - first_head * units_per_head);
  const bool has_second = unit.second < rotary.head_size;
  Pack<T, kCount> a[kHeadsInFlight], b[kHeadsInFlight];
  const auto load = [&](int32_t start) {
#pragma unroll
    for (int j = 0; j < kHeadsInFlight; ++j) {
      const int32_t head = start + j * heads_at_once;
      if (head >= heads.count()) break;
      const T* source = heads.address(head);
      a[j] = load_pack<kCount>(source + unit.first);
      if (has_second) b[j] = load_pack<kCount>(source + unit.second);
    }
  };
  wait_for_previous_kernel();
  load(first_head);
  const int64_t position = index_at(rotary.positions, rotary.positions_are_int64, heads.token);
  const int64_t slot = Policy::kStores ? slot_offset(store, heads.token) : -1;
  const bool rotates = is_usable_index("positions", position, rotary.max_positions, kNoSkipMark) && unit.is_rotated;
  float cosines[kCount], sines[kCount];
  if (rotates) unit.load_table(rotary.cos_sin + position * rotary.rot_dim, rotary.rot_dim, cosines, sines);
  for (int32_t start = first_head; start < heads.count(); start += kHeadsInFlight * heads_at_once) {
    if (start != first_head) load(start);
#pragma unroll
    for (int j = 0; j < kHeadsInFlight; ++j) {
      const int32_t head = start + j * heads_at_once;
      if (head >= heads.count()) break;
      if (rotates && !heads.is_value(head)) {
        unit.rotate(a[j], b[j], cosines, sines);
        T* target = heads.address(head);
        store_pack(target + unit.first, a[j]);
        store_pack(target + unit.second, b[j]);
      }
      if (slot >= 0 && !heads.is_query(head)) {
        heads.keep(head, slot, unit.first, a[j]);
        if (has_second) heads.keep(head, slot, unit.second, b[j]);
      }
    }
  }
}

template <typename T>
bool allows_packs(const RotaryParams& p) {
  constexpr int64_t kCount = kPackOf<T>;
  return p.rot_dim % (2 * kCount) == 0 && p.head_size % kCount == 0 && p.q_token_stride % kCount == 0 &&
         p.q_head_stride % kCount == 0 && p.k_token_stride % kCount == 0 && p.k_head_stride % kCount == 0 &&
         is_aligned(p.q, kAccessBytes) && is_aligned(p.k, kAccessBytes) && is_aligned(p.cos_sin, kCount * 4);
}

template <typename T, RotaryLayout kLayout, int kCount, typename Policy>
int launch_rotary(const RotaryParams& rotary, const StoreKvParams& store, cudaStream_t stream) {
  // Without a cache, only rotated units have work.
  const int32_t elements = Policy::kStores ? rotary.head_size : rotary.rot_dim;
  const int32_t units = divide_up(elements, 2 * kCount);
  if (units == 0) return 0;
  const int32_t heads = rotary.num_query_heads + rotary.num_kv_heads * (Policy::kStores ? 2 : 1);
  if (units > kMaxThreads) return fail("rotary: head_size %d is not supported", rotary.head_size);
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  const int32_t preferred = rotary.num_tokens <= limits->num_multiprocessors ? kThreadsOfFew : kThreadsOfMany;
  // Each thread takes kHeadsInFlight heads at a time; as few rounds as the block's size allows.
  const int32_t at_once = std::clamp(divide_up(heads, kHeadsInFlight), 1, std::max(1, preferred / units));
  const int32_t rounds = divide_up(heads, at_once);
  const int32_t heads_at_once = divide_up(heads, rounds);
  const int32_t threads = divide_up(heads_at_once * units, kWarpLanes) * kWarpLanes;
  return launch_overlapped(Policy::kStores ? "rope_and_store" : "rotary", rotary_kernel<T, kLayout, kCount, Policy>,
                           static_cast<unsigned>(rotary.num_tokens), static_cast<unsigned>(threads), stream, rotary,
                           store, units, heads_at_once);
}

template <typename T, typename Policy>
int launch_by_layout(const RotaryParams& rotary, const StoreKvParams& store, cudaStream_t stream) {
  const bool packs = allows_packs<T>(rotary) && (!Policy::kStores || cuda::allows_packs(store));
  constexpr int kWide = kPackOf<T>;
  if (rotary.layout == RotaryLayout::kNeox) {
    return packs ? launch_rotary<T, RotaryLayout::kNeox, kWide, Policy>(rotary, store, stream)
                 : launch_rotary<T, RotaryLayout::kNeox, 1, Policy>(rotary, store, stream);
  }
  return packs ? launch_rotary<T, RotaryLayout::kInterleaved, kWide, Policy>(rotary, store, stream)
               : launch_rotary<T, RotaryLayout::kInterleaved, 1, Policy>(rotary, store, stream);
}

template <typename Policy>
int launch_by_dtype(const RotaryParams& rotary, const StoreKvParams& store, cudaStream_t stream) {
  if (rotary.num_tokens == 0) return 0;
  if (rotary.num_tokens > INT32_MAX) {
    return fail("rotary: num_tokens %lld is not supported; supported: up to %d",
                static_cast<long long>(rotary.num_tokens), INT32_MAX);
  }
  return with_element_type(
      rotary.dtype, [&](auto element) { return launch_by_layout<decltype(element), Policy>(rotary, store, stream); });
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int pagemill_cuda_rotary(const RotaryParams* params, void* stream) {
  return cuda::launch_by_dtype<cuda::RotateOnly>(*params, StoreKvParams{}, static_cast<cudaStream_t>(stream));
}

int pagemill_cuda_rope_and_store(const RotaryParams* rotary, const StoreKvParams* store, void* stream) {
  return cuda::launch_by_dtype<cuda::RotateAndStore>(*rotary, *store, static_cast<cudaStream_t>(stream));
}
}
