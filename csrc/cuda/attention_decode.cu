#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention_decode_dispatch.h"
#include "attention_launch.h"
#include "error.h"

namespace pagemill::cuda {
namespace {

template <int kValue>
struct Constant {
  static constexpr int value = kValue;
};

// What `functor` gives for the head size as a constant; `otherwise` with fail() where it is not supported.
template <typename Functor, typename Result>
Result with_head_size(int32_t head_size, Result otherwise, Functor functor) {
  switch (head_size) {
    case 64:
      return functor(Constant<64>{});
    case 80:
      return functor(Constant<80>{});
    case 96:
      return functor(Constant<96>{});
    case 112:
      return functor(Constant<112>{});
    case 128:
      return functor(Constant<128>{});
    case 192:
      return functor(Constant<192>{});
    case 256:
      return functor(Constant<256>{});
    default:
      fail("paged_attention: head_size %d is not supported; supported: 64, 80, 96, 112, 128, 192, 256", head_size);
      return otherwise;
  }
}

}  // namespace

int32_t decode_workers(const PagedAttentionParams& p) {
  return with_head_size(p.head_size, int32_t{0}, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    return p.dtype == DType::kBFloat16 ? decode::workers_of_head_size<kHeadSize, __nv_bfloat16>(p)
                                       : decode::workers_of_head_size<kHeadSize, __half>(p);
  });
}

int launch_decode(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  return with_head_size(p.head_size, 1, [&](auto head_size) {
    constexpr int kHeadSize = decltype(head_size)::value;
    return p.dtype == DType::kBFloat16 ? decode::launch_head_size<kHeadSize, __nv_bfloat16>(p, launch, stream)
                                       : decode::launch_head_size<kHeadSize, __half>(p, launch, stream);
  });
}

}  // namespace pagemill::cuda
