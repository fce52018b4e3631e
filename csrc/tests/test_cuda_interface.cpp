// The CUDA library as a stranger sees it: loaded at run time from the path given, on a machine with or without a GPU.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "pagemill/cuda_kernels.h"

namespace {

using namespace pagemill;

int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s: failed\n", what);
  ++failures;
}

void* library = nullptr;

template <typename Function>
Function* find(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    std::fprintf(stderr, "no %s in the library\n", name);
    ++failures;
  }
  return function;
}

RmsNormParams one_row(void* memory) {
  RmsNormParams p{};
  p.out = memory;
  p.x = p.weight = memory;
  p.num_tokens = 1;
  p.hidden = p.out_stride = p.x_stride = 64;
  p.epsilon = 1e-5f;
  return p;
}

void test_without_device() {
  auto* last_error = find<decltype(pagemill_cuda_last_error)>("pagemill_cuda_last_error");
  auto* device_info = find<decltype(pagemill_cuda_device_info)>("pagemill_cuda_device_info");
  auto* rms_norm = find<decltype(pagemill_cuda_rms_norm)>("pagemill_cuda_rms_norm");
  if (last_error == nullptr || device_info == nullptr || rms_norm == nullptr) return;
  CudaDeviceInfo info{};
  expect(device_info(0, &info) != 0 && std::strlen(last_error()) > 0, "device_info says that there is no device");
  alignas(16) float memory[64] = {};
  const RmsNormParams p = one_row(memory);
  expect(rms_norm(&p, nullptr) != 0, "a kernel is not launched without a device");
  expect(std::strstr(last_error(), "cuda") != nullptr || std::strstr(last_error(), "CUDA") != nullptr,
         "a launch without a device says so");
}

void test_each_device(int32_t count) {
  auto* device_info = find<decltype(pagemill_cuda_device_info)>("pagemill_cuda_device_info");
  for (int32_t device = 0; device_info != nullptr && device < count; ++device) {
    CudaDeviceInfo info{};
    expect(device_info(device, &info) == 0, "device_info of a device");
    expect(info.compute_capability >= 50 && info.num_multiprocessors > 0, "device_info is filled in");
    std::printf("device %d: %s, compute capability %d, %d multiprocessors\n", device, info.name,
                info.compute_capability, info.num_multiprocessors);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: test_cuda_interface PATH_OF_LIBRARY\n");
    return 2;
  }
  library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  int32_t count = -1;
  if (auto* device_count = find<decltype(pagemill_cuda_device_count)>("pagemill_cuda_device_count")) {
    expect(device_count(&count) == 0 && count >= 0, "device_count answers on every machine");
    std::printf("%d devices\n", count);
  }
  if (count == 0) test_without_device();
  if (count > 0) test_each_device(count);
  std::printf("%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}
