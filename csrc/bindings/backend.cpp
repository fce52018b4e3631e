#include "backend.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "pagemill/kernels.h"

namespace pagemill::bindings {
namespace {

constexpr Backend kCpu = {
    .last_error = pagemill_last_error,
    .rms_norm = [](const RmsNormParams* p, void*) { return pagemill_rms_norm(p); },
    .rotary = [](const RotaryParams* p, void*) { return pagemill_rotary(p); },
    .rope_and_store = [](const RotaryParams* r, const StoreKvParams* s,
                         void*) { return pagemill_rope_and_store(r, s); },
    .store_kv = [](const StoreKvParams* p, void*) { return pagemill_store_kv(p); },
    .activation_and_mul = [](const ActivationParams* p, void*) { return pagemill_activation_and_mul(p); },
    .gather_rows = [](const GatherRowsParams* p, void*) { return pagemill_gather_rows(p); },
    .prepare_step = [](const PrepareStepParams* p, void*) { return pagemill_prepare_step(p); },
    .scatter = [](const ScatterParams* p, void*) { return pagemill_scatter(p); },
    .copy_blocks = [](const CopyBlocksParams* p, void*) { return pagemill_copy_blocks(p); },
    .swap_blocks = [](const SwapBlocksParams* p, void*) { return pagemill_swap_blocks(p); },
    .sample = [](const SampleParams* p, void*, void*) { return pagemill_sample(p); },
    .token_logprobs = [](const TokenLogprobsParams* p, void*, void*) { return pagemill_token_logprobs(p); },
    .merge_attention = [](const MergeAttentionParams* p, void*) { return pagemill_merge_attention(p); },
    .paged_attention = [](const PagedAttentionParams* p, const AttentionLaunch*,
                          void*) { return pagemill_paged_attention(p); },
    .paged_attention_v1 = [](const PagedAttentionParams* p, const AttentionLaunch*,
                             void*) { return pagemill_paged_attention(p); },
    .paged_attention_v2 = [](const PagedAttentionParams* p, const AttentionLaunch*,
                             void*) { return pagemill_paged_attention(p); },
};

// $PAGEMILL_CUDA_LIBRARY, or the library beside this module.
std::string cuda_library_path() {
  const char* given = std::getenv("PAGEMILL_CUDA_LIBRARY");
  if (given != nullptr && *given != '\0') return given;
  Dl_info info{};
  dladdr(reinterpret_cast<const void*>(&cuda_library_path), &info);
  const std::string module = info.dli_fname == nullptr ? "" : info.dli_fname;
  return module.substr(0, module.rfind('/') + 1) + "libpagemill_cuda.so";
}

struct CudaLibrary {
  Backend kernels{};
  CudaFunctions functions{};
  std::string error;

  CudaLibrary() {
    const std::string path = cuda_library_path();
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* reason = dlerror();
      error = "the CUDA kernels do not load: " + std::string(reason == nullptr ? path : reason);
      return;
    }
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find(kernels.last_error, "pagemill_cuda_last_error");
    find(kernels.rms_norm, "pagemill_cuda_rms_norm");
    find(kernels.rotary, "pagemill_cuda_rotary");
    find(kernels.rope_and_store, "pagemill_cuda_rope_and_store");
    find(kernels.store_kv, "pagemill_cuda_store_kv");
    find(kernels.activation_and_mul, "pagemill_cuda_activation_and_mul");
    find(kernels.gather_rows, "pagemill_cuda_gather_rows");
    find(kernels.prepare_step, "pagemill_cuda_prepare_step");
    find(kernels.scatter, "pagemill_cuda_scatter");
    find(kernels.copy_blocks, "pagemill_cuda_copy_blocks");
    find(kernels.swap_blocks, "pagemill_cuda_swap_blocks");
    find(kernels.sample, "pagemill_cuda_sample");
    find(kernels.token_logprobs, "pagemill_cuda_token_logprobs");
    find(kernels.merge_attention, "pagemill_cuda_merge_attention");
    find(kernels.paged_attention, "pagemill_cuda_paged_attention");
    find(kernels.paged_attention_v1, "pagemill_cuda_paged_attention_v1");
    find(kernels.paged_attention_v2, "pagemill_cuda_paged_attention_v2");
    find(functions.device_count, "pagemill_cuda_device_count");
    find(functions.device_info, "pagemill_cuda_device_info");
    find(functions.attention_workers, "pagemill_cuda_attention_workers");
    find(functions.sample_workspace, "pagemill_cuda_sample_workspace");
    find(functions.skinny_linear_workspace, "pagemill_cuda_skinny_linear_workspace");
    find(functions.skinny_linear_wins, "pagemill_cuda_skinny_linear_wins");
    find(functions.skinny_linear, "pagemill_cuda_skinny_linear");
    if (kernels.last_error == nullptr) error = path + " is not a library of Pagemill's CUDA kernels";
  }
};

// Loaded when first asked for and never unloaded: kernels may still be running at exit.
const CudaLibrary& cuda_library() {
  static const CudaLibrary* const library = new CudaLibrary;
  if (!library->error.empty()) throw std::runtime_error(library->error);
  return *library;
}

}  // namespace

const Backend& backend(DeviceType device) { return device == DeviceType::kCpu ? kCpu : cuda_library().kernels; }

const CudaFunctions& cuda_functions() { return cuda_library().functions; }

}  // namespace pagemill::bindings
