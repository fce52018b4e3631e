// Chooses among the instantiations of the decode kernel for a head size, and launches it.
#pragma once

#include "attention_decode_dispatch.h"
#include "attention_decode_kernel.cuh"
#include "kernel_setup.cuh"

namespace pagemill::cuda::decode {

// Rings of 64 KB serve every device: sm_86 and sm_89 have 99 KB a multiprocessor. Where deeper ones are faster, sm_90
// and later have room for them: 227 KB, for two thread blocks, or for one where wide heads leave registers for one
// only.
template <typename T, int kHeadSize, Cache kCache, bool kIsLarge>
struct Tuning {
  static constexpr int kRowBytes = kHeadSize * (kCache == Cache::k16Bit ? 2 : 1);
  static constexpr int kStageKilobytes = (kRowBytes + 127) / 128 * 4;
  static constexpr bool kIsWide = kHeadSize > 128;
  static constexpr int kWarps = kIsLarge || !kIsWide ? 4 : 2;
  static constexpr bool kIsDeep = kIsLarge && !has_shallow_ring(kHeadSize, kCache);
  static constexpr int kRingKilobytes = !kIsDeep ? 64 : kIsWide ? 192 : 96;
  static constexpr int kStages = kRingKilobytes / (kWarps * kStageKilobytes);
  static constexpr int kBlocks = kIsWide ? 1 : 2;  // that registers leave room for
  using C = Config<T, kHeadSize, kCache, kWarps, kStages>;
};

constexpr int kLargeCapability = 90;

template <typename C, int kBlocks>
const KernelSetup& setup() {
  return kernel_setup<decode_kernel<C, kBlocks>>(C::kWarps * 32, C::kSharedBytes);
}

inline Arguments make_arguments(const PagedAttentionParams& p, const AttentionLaunch& l) {
  Arguments a{};
  a.p = p;
  a.plan = l.plan;
  a.counters = static_cast<int32_t*>(l.workspace);
  a.partials = reinterpret_cast<float*>(static_cast<char*>(l.workspace) + kDecodeCounterBytes);
  a.group = p.num_query_heads / p.num_kv_heads;
  a.inverse_group = 1.0f / static_cast<float>(a.group);
  a.block_size_log2 = __builtin_ctz(static_cast<unsigned>(p.block_size));
  a.block_bytes =
      static_cast<uint32_t>(int64_t{p.num_kv_heads} * p.block_size * p.head_size * kv_bytes(p.kv_dtype, p.dtype));
  return a;
}

template <typename C, int kBlocks>
int launch(const PagedAttentionParams& p, const AttentionLaunch& l, bool is_large, cudaStream_t stream) {
  if (const int error = check_cuda("paged_attention (decode)", setup<C, kBlocks>().error)) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(l.num_workers));
  config.blockDim = dim3(C::kWarps * 32);
  config.dynamicSmemBytes = C::kSharedBytes;
  config.stream = stream;
  // The plan and the first block ids are read while the kernel before this one runs.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = is_large ? 1 : 0;
  return check_cuda("paged_attention (decode)",
                    cudaLaunchKernelEx(&config, decode_kernel<C, kBlocks>, make_arguments(p, l)));
}

// Calls functor.template operator()<C, kBlocks>() for the cache and the device.
template <int kHeadSize, typename T, bool kIsLarge, typename Functor>
auto with_cache(KvDType kv_dtype, Functor functor) {
  using K = Cache;
  const auto call = [&]<typename Tuned>() { return functor.template operator()<typename Tuned::C, Tuned::kBlocks>(); };
  switch (kv_dtype) {
    case KvDType::kFp8E4M3:
      return call.template operator()<Tuning<T, kHeadSize, K::kE4M3, kIsLarge>>();
    case KvDType::kFp8E5M2:
      return call.template operator()<Tuning<T, kHeadSize, K::kE5M2, kIsLarge>>();
    default:
      return call.template operator()<Tuning<T, kHeadSize, K::k16Bit, kIsLarge>>();
  }
}

template <int kHeadSize, typename T>
int launch_head_size(const PagedAttentionParams& p, const AttentionLaunch& l, cudaStream_t stream) {
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  const bool is_large = limits->compute_capability >= kLargeCapability;
  const auto run = [&]<typename C, int kBlocks>() { return launch<C, kBlocks>(p, l, is_large, stream); };
  return is_large ? with_cache<kHeadSize, T, true>(p.kv_dtype, run) : with_cache<kHeadSize, T, false>(p.kv_dtype, run);
}

template <int kHeadSize, typename T>
int32_t workers_of_head_size(const PagedAttentionParams& p) {
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 0;
  const auto count = [&]<typename C, int kBlocks>() -> int32_t {
    const KernelSetup& made = setup<C, kBlocks>();
    return check_cuda("paged_attention (decode)", made.error) == 0 ? made.resident_blocks : 0;
  };
  return limits->compute_capability >= kLargeCapability ? with_cache<kHeadSize, T, true>(p.kv_dtype, count)
                                                        : with_cache<kHeadSize, T, false>(p.kv_dtype, count);
}

}  // namespace pagemill::cuda::decode
