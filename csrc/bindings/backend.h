// The kernels of one type of device behind one set of function pointers, so that a binding is written once.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "pagemill/attention_plan.h"
#include "pagemill/cuda_kernels.h"
#include "pagemill/params.h"

namespace pagemill::bindings {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// The type of device of a call's tensors, as the Python face passes it.
enum class DeviceType : int { kCpu = 0, kCuda = 1 };

// Where an entry is null the library lacks the function. CPU kernels ignore streams, workspaces and launches.
struct Backend {
  const char* (*last_error)();
  int (*rms_norm)(const RmsNormParams*, void* stream);
  int (*rotary)(const RotaryParams*, void* stream);
  int (*rope_and_store)(const RotaryParams*, const StoreKvParams*, void* stream);
  int (*store_kv)(const StoreKvParams*, void* stream);
  int (*activation_and_mul)(const ActivationParams*, void* stream);
  int (*gather_rows)(const GatherRowsParams*, void* stream);
  int (*prepare_step)(const PrepareStepParams*, void* stream);
  int (*scatter)(const ScatterParams*, void* stream);
  int (*copy_blocks)(const CopyBlocksParams*, void* stream);
  int (*swap_blocks)(const SwapBlocksParams*, void* stream);
  int (*sample)(const SampleParams*, void* workspace, void* stream);
  int (*token_logprobs)(const TokenLogprobsParams*, void* workspace, void* stream);
  int (*merge_attention)(const MergeAttentionParams*, void* stream);
  int (*paged_attention)(const PagedAttentionParams*, const AttentionLaunch*, void* stream);
  int (*paged_attention_v1)(const PagedAttentionParams*, const AttentionLaunch*, void* stream);
  int (*paged_attention_v2)(const PagedAttentionParams*, const AttentionLaunch*, void* stream);
};

// CUDA alone.
struct CudaFunctions {
  int (*device_count)(int32_t*);
  int (*device_info)(int32_t, CudaDeviceInfo*);
  int32_t (*attention_workers)(const PagedAttentionParams*);
  int64_t (*sample_workspace)(const SampleParams*);
  int64_t (*skinny_linear_workspace)(const SkinnyLinearParams*);
  int32_t (*skinny_linear_wins)(const SkinnyLinearParams*);
  int (*skinny_linear)(const SkinnyLinearParams*, void* stream);
};

// Throws std::runtime_error where the CUDA library is missing or does not load.
const Backend& backend(DeviceType device);
const CudaFunctions& cuda_functions();

template <typename Function, typename... Arguments>
auto call(Function function, const char* name, Arguments... arguments) {
  if (function == nullptr) throw std::runtime_error(std::string("the CUDA library was built without ") + name);
  return function(arguments...);
}

// ValueError in Python for what was refused, RuntimeError where the device failed.
inline void raise_on(const Backend& kernels, int status) {
  if (status == 1) throw std::invalid_argument(kernels.last_error());
  if (status != 0) throw std::runtime_error(kernels.last_error());
}

}  // namespace pagemill::bindings
