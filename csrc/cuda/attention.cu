// Checks what attention can check on the host, and chooses its kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "attention_launch.h"
#include "error.h"
#include "pagemill/cuda_kernels.h"

namespace pagemill::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // bytes, of every load

int check_types(const PagedAttentionParams& p) {
  if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
    return fail("paged_attention: dtype %d is not supported; supported: float32, bfloat16, float16",
                static_cast<int>(p.dtype));
  }
  if (p.kv_dtype != KvDType::kActivation && p.kv_dtype != KvDType::kFp8E4M3 && p.kv_dtype != KvDType::kFp8E5M2) {
    return fail("paged_attention: kv_dtype %d is not supported; supported: the query's, float8_e4m3, float8_e5m2",
                static_cast<int>(p.kv_dtype));
  }
  switch (p.head_size) {
    case 64:
    case 80:
    case 96:
    case 112:
    case 128:
    case 192:
    case 256:
      break;
    default:
      return fail("paged_attention: head_size %d is not supported; supported: 64, 80, 96, 112, 128, 192, 256",
                  p.head_size);
  }
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  if (limits->compute_capability < 80) {
    return fail("paged_attention: compute capability %d.%d is not supported; supported: 8.0 and later",
                limits->compute_capability / 10, limits->compute_capability % 10);
  }
  return 0;
}

int check_sizes(const PagedAttentionParams& p) {
  if (p.block_size != 8 && p.block_size != 16 && p.block_size != 32 && p.block_size != 64) {
    return fail("paged_attention: block_size %d is not supported; supported: 8, 16, 32, 64", p.block_size);
  }
  if (p.num_query_heads <= 0 || p.num_kv_heads <= 0 || p.num_query_heads % p.num_kv_heads != 0) {
    return fail("paged_attention: num_query_heads %d is not a multiple of num_kv_heads %d", p.num_query_heads,
                p.num_kv_heads);
  }
  if (p.num_tokens < 0 || p.num_tokens > INT32_MAX / p.num_query_heads || p.num_seqs < 0) {
    return fail("paged_attention: num_tokens %lld and num_seqs %d are not supported; supported: 0 to 2^31 rows",
                static_cast<long long>(p.num_tokens), p.num_seqs);
  }
  // Kernels count the rows of a cache in 32 bits, and its chunks of 16 bytes without a sign.
  const int64_t row_chunks = p.head_size * kv_bytes(p.kv_dtype, p.dtype) / kAlignment;
  const int64_t most_rows = std::min<int64_t>(INT32_MAX, (UINT32_MAX - 1) / row_chunks);
  const int64_t most_blocks = most_rows / (int64_t{p.num_kv_heads} * p.block_size);
  if (p.num_blocks < 0 || p.num_blocks > most_blocks || p.max_blocks < 0 || p.max_blocks > INT32_MAX) {
    return fail("paged_attention: num_blocks %lld and max_blocks %lld are not supported; supported: 0 to %lld blocks",
                static_cast<long long>(p.num_blocks), static_cast<long long>(p.max_blocks),
                static_cast<long long>(most_blocks));
  }
  if (p.window != -1 && p.window < 1) {
    return fail("paged_attention: window %d is not supported; supported: -1 (all keys), 1 and more", p.window);
  }
  if (!std::isfinite(p.scale)) return fail("paged_attention: scale %g is not finite", static_cast<double>(p.scale));
  if (!std::isfinite(p.soft_cap) || p.soft_cap < 0.0f) {
    return fail("paged_attention: soft_cap %g is not supported; supported: 0 (none) and positive numbers",
                static_cast<double>(p.soft_cap));
  }
  return 0;
}

struct NamedPointer {
  const char* name;
  const void* pointer;
  int64_t alignment;
};

int check_pointers(const PagedAttentionParams& p) {
  const NamedPointer pointers[] = {{"out", p.out, kAlignment},
                                   {"query", p.query, kAlignment},
                                   {"key_cache", p.key_cache, kAlignment},
                                   {"value_cache", p.value_cache, kAlignment},
                                   {"block_tables", p.block_tables, 4},
                                   {"query_start", p.query_start, 4},
                                   {"context_lens", p.context_lens, 4}};
  for (const NamedPointer& named : pointers) {
    if (named.pointer == nullptr) return fail("paged_attention: %s is missing", named.name);
    if (reinterpret_cast<uintptr_t>(named.pointer) % named.alignment != 0) {
      return fail("paged_attention: %s must begin at a multiple of %lld bytes", named.name,
                  static_cast<long long>(named.alignment));
    }
  }
  const struct {
    const char* name;
    int64_t stride;
  } strides[] = {{"out's token", p.out_token_stride},
                 {"out's head", p.out_head_stride},
                 {"query's token", p.query_token_stride},
                 {"query's head", p.query_head_stride}};
  const int64_t multiple = kAlignment / dtype_bytes(p.dtype);
  for (const auto& named : strides) {
    if (named.stride % multiple != 0) {
      return fail("paged_attention: %s stride %lld is not supported; supported: multiples of %lld", named.name,
                  static_cast<long long>(named.stride), static_cast<long long>(multiple));
    }
  }
  return 0;
}

int check_launch(const AttentionLaunch& launch) {
  if (launch.version != 1 && launch.version != 2) {
    return fail("paged_attention: plan has version %d; supported: 1, 2", launch.version);
  }
  if (!launch.has_decode && !launch.has_prefill) return 0;
  if (launch.plan == nullptr) return fail("paged_attention: plan is missing");
  if (reinterpret_cast<uintptr_t>(launch.plan) % kAlignment != 0) {
    return fail("paged_attention: plan must begin at a multiple of 16 bytes");
  }
  if (launch.has_decode && launch.num_workers < 1) {
    return fail("paged_attention: plan has num_workers %d; it must be positive", launch.num_workers);
  }
  if (!launch.has_decode || launch.version != 2) return 0;
  if (launch.workspace == nullptr) return fail("paged_attention: workspace is missing, and this plan needs one");
  if (launch.workspace_bytes <= kDecodeCounterBytes) {
    return fail("paged_attention: workspace has %lld bytes, and a plan of version 2 needs more than %lld",
                static_cast<long long>(launch.workspace_bytes), static_cast<long long>(kDecodeCounterBytes));
  }
  return 0;
}

int check_all(const PagedAttentionParams& p, const AttentionLaunch& launch) {
  if (const int error = check_types(p)) return error;
  if (const int error = check_sizes(p)) return error;
  if (const int error = check_launch(launch)) return error;
  return p.num_tokens == 0 || p.num_seqs == 0 ? 0 : check_pointers(p);
}

int launch_all(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_seqs == 0) return 0;
  if (p.dtype == DType::kFloat32) return launch_simt(p, launch, stream);
  if (launch.has_decode) {
    if (const int error = launch_decode(p, launch, stream)) return error;
  }
  if (!launch.has_prefill) return 0;
  const DeviceLimits* limits = device_limits();
  if (limits == nullptr) return 1;
  return wgmma_prefill_supports(p, limits->compute_capability) ? launch_prefill_wgmma(p, launch, stream)
                                                               : launch_prefill_mma(p, launch, stream);
}

int launch_version(const PagedAttentionParams& p, const AttentionLaunch& launch, int32_t version, cudaStream_t stream) {
  if (const int error = check_all(p, launch)) return error;
  if (launch.version != version) {
    return fail("paged_attention_v%d: plan has version %d; make it with version %d", version, launch.version, version);
  }
  if (launch.has_prefill) {
    return fail("paged_attention_v%d: plan has prefill tiles; supported: at most %d rows to each sequence", version,
                kDecodeMaxRows);
  }
  return launch_all(p, launch, stream);
}

}  // namespace
}  // namespace pagemill::cuda

extern "C" {

using namespace pagemill;

int32_t pagemill_cuda_attention_workers(const PagedAttentionParams* params) {
  if (cuda::check_types(*params) != 0) return 0;
  return params->dtype == DType::kFloat32 ? cuda::simt_workers(*params) : cuda::decode_workers(*params);
}

int pagemill_cuda_paged_attention(const PagedAttentionParams* params, const AttentionLaunch* launch, void* stream) {
  if (const int error = cuda::check_all(*params, *launch)) return error;
  return cuda::launch_all(*params, *launch, static_cast<cudaStream_t>(stream));
}

int pagemill_cuda_paged_attention_v1(const PagedAttentionParams* params, const AttentionLaunch* launch, void* stream) {
  return cuda::launch_version(*params, *launch, 1, static_cast<cudaStream_t>(stream));
}

int pagemill_cuda_paged_attention_v2(const PagedAttentionParams* params, const AttentionLaunch* launch, void* stream) {
  return cuda::launch_version(*params, *launch, 2, static_cast<cudaStream_t>(stream));
}
}
