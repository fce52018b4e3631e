// Sampling and log-probabilities.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "backend.h"
#include "bind.h"

namespace py = pybind11;

namespace pagemill::bindings {
namespace {

struct Sample {
  const Backend& kernels;
  SampleParams params{};

  Sample(int device, int64_t num_rows, int64_t vocab_size, int64_t logits_stride, int32_t num_top, int dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_rows = num_rows;
    params.vocab_size = vocab_size;
    params.logits_stride = logits_stride;
    params.num_top = num_top;
    params.dtype = static_cast<DType>(dtype);
  }

  // Addresses in the order of SampleParams' pointers.
  void run(const std::vector<Address>& a, Address workspace, Address stream) const {
    SampleParams p = params;
    size_t i = 0;
    const auto next = [&] { return a.at(i++); };
    p.logits = pointer<void>(next());
    p.temperature = pointer<float>(next());
    p.top_k = pointer<int32_t>(next());
    p.top_p = pointer<float>(next());
    p.min_p = pointer<float>(next());
    p.seeds = pointer<uint64_t>(next());
    p.positions = pointer<int64_t>(next());
    p.presence_penalty = pointer<float>(next());
    p.frequency_penalty = pointer<float>(next());
    p.repetition_penalty = pointer<float>(next());
    p.prompt_offsets = pointer<int32_t>(next());
    p.prompt_ends = pointer<int32_t>(next());
    p.prompt_ids = pointer<int32_t>(next());
    p.output_offsets = pointer<int32_t>(next());
    p.output_ends = pointer<int32_t>(next());
    p.output_ids = pointer<int32_t>(next());
    p.bias_offsets = pointer<int32_t>(next());
    p.bias_ids = pointer<int32_t>(next());
    p.bias_values = pointer<float>(next());
    p.masked_offsets = pointer<int32_t>(next());
    p.masked_ids = pointer<int32_t>(next());
    p.out_ids = pointer<int64_t>(next());
    p.out_logprobs = pointer<float>(next());
    p.out_ranks = pointer<int32_t>(next());
    p.out_status = pointer<int32_t>(next());
    p.out_top_ids = pointer<int32_t>(next());
    p.out_top_logprobs = pointer<float>(next());
    int error;
    {
      py::gil_scoped_release release;
      error = call(kernels.sample, "sample", &p, pointer<void>(workspace), pointer<void>(stream));
    }
    raise_on(kernels, error);
  }
};

struct TokenLogprobs {
  const Backend& kernels;
  TokenLogprobsParams params{};

  TokenLogprobs(int device, int64_t num_rows, int64_t vocab_size, int64_t logits_stride, int32_t num_top, int dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_rows = num_rows;
    params.vocab_size = vocab_size;
    params.logits_stride = logits_stride;
    params.num_top = num_top;
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address logits, Address ids, Address out_logprobs, Address out_ranks, Address out_status,
           Address out_top_ids, Address out_top_logprobs, Address workspace, Address stream) const {
    TokenLogprobsParams p = params;
    p.logits = pointer<void>(logits);
    p.ids = pointer<int64_t>(ids);
    p.out_logprobs = pointer<float>(out_logprobs);
    p.out_ranks = pointer<int32_t>(out_ranks);
    p.out_status = pointer<int32_t>(out_status);
    p.out_top_ids = pointer<int32_t>(out_top_ids);
    p.out_top_logprobs = pointer<float>(out_top_logprobs);
    int error;
    {
      py::gil_scoped_release release;
      error = call(kernels.token_logprobs, "token_logprobs", &p, pointer<void>(workspace), pointer<void>(stream));
    }
    raise_on(kernels, error);
  }
};

// Bytes that sample and token_logprobs need on the current CUDA device for at most this many rows, whatever the
// parameters.
int64_t sample_workspace(int64_t num_rows, int64_t vocab_size, int32_t num_top, int dtype) {
  SampleParams p{};
  p.num_rows = num_rows;
  p.vocab_size = p.logits_stride = vocab_size;
  p.num_top = num_top;
  p.dtype = static_cast<DType>(dtype);
  return call(cuda_functions().sample_workspace, "sample_workspace", &p);
}

}  // namespace

void bind_sampling(py::module_& module) {
  py::class_<Sample>(module, "Sample")
      .def(py::init<int, int64_t, int64_t, int64_t, int32_t, int>())
      .def("run", &Sample::run);
  py::class_<TokenLogprobs>(module, "TokenLogprobs")
      .def(py::init<int, int64_t, int64_t, int64_t, int32_t, int>())
      .def("run", &TokenLogprobs::run);
  module.def("sample_workspace", &sample_workspace);
}

}  // namespace pagemill::bindings
