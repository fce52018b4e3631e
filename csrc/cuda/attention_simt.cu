#include "attention_launch.h"
#include "attention_simt_dispatch.h"
#include "error.h"

namespace pagemill::cuda {

// The kernel takes whole entries, not the plan's pieces: any number will do.
int32_t simt_workers(const PagedAttentionParams&) {
  const DeviceLimits* limits = device_limits();
  return limits != nullptr ? limits->num_multiprocessors : 0;
}

int launch_simt(const PagedAttentionParams& p, const AttentionLaunch& launch, cudaStream_t stream) {
  switch (p.head_size) {
    case 64:
      return simt::launch_head_size<64>(p, launch, stream);
    case 80:
      return simt::launch_head_size<80>(p, launch, stream);
    case 96:
      return simt::launch_head_size<96>(p, launch, stream);
    case 112:
      return simt::launch_head_size<112>(p, launch, stream);
    case 128:
      return simt::launch_head_size<128>(p, launch, stream);
    case 192:
      return simt::launch_head_size<192>(p, launch, stream);
    case 256:
      return simt::launch_head_size<256>(p, launch, stream);
    default:
      return fail("paged_attention: head_size %d is not supported; supported: 64, 80, 96, 112, 128, 192, 256",
                  p.head_size);
  }
}

}  // namespace pagemill::cuda
