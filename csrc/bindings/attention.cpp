// Attention, its plan, and the joining of partial results.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "backend.h"
#include "bind.h"
#include "pagemill/kernels.h"

namespace py = pybind11;

namespace pagemill::bindings {
namespace {

// addresses: of query_start and context_lens in host memory, and of the plan's int32 array there. sizes: sequences,
// query heads, KV heads, head size.
AttentionPlanResult plan_attention(Address query_start, Address context_lens, const std::vector<int32_t>& sizes,
                                   int32_t window, int32_t num_workers, int version, int32_t partition_keys,
                                   Address plan, int64_t capacity) {
  AttentionPlanParams p{};
  p.query_start = pointer<int32_t>(query_start);
  p.context_lens = pointer<int32_t>(context_lens);
  p.num_seqs = sizes.at(0);
  p.num_query_heads = sizes.at(1);
  p.num_kv_heads = sizes.at(2);
  p.window = window;
  p.num_workers = num_workers;
  p.version = static_cast<AttentionVersion>(version);
  p.partition_keys = partition_keys;
  AttentionPlanResult result{};
  raise_on(backend(DeviceType::kCpu),
           pagemill_plan_attention(&p, sizes.at(3), pointer<int32_t>(plan), capacity, &result));
  return result;
}

// bounds: tokens, sequences and positions of a step. heads: query heads, KV heads, head size.
AttentionPlanResult attention_plan_capacity(const std::vector<int64_t>& bounds, const std::vector<int32_t>& heads,
                                            int32_t num_workers, int32_t partition_keys) {
  const AttentionPlanBounds b{bounds.at(0), bounds.at(1), bounds.at(2), heads.at(0),
                              heads.at(1),  heads.at(2),  num_workers,  partition_keys};
  AttentionPlanResult result{};
  raise_on(backend(DeviceType::kCpu), pagemill_attention_plan_capacity(&b, &result));
  return result;
}

AttentionLaunch make_launch(Address plan, Address workspace, int64_t workspace_bytes, int32_t num_workers,
                            const AttentionPlanResult& result) {
  AttentionLaunch launch{};
  launch.plan = pointer<int32_t>(plan);
  launch.workspace = pointer<void>(workspace);
  launch.workspace_bytes = workspace_bytes;
  launch.num_workers = num_workers;
  launch.version = result.version;
  launch.has_decode = result.has_decode;
  launch.has_prefill = result.has_prefill;
  return launch;
}

struct PagedAttention {
  // More query rows than this may take milliseconds on a CPU: other Python threads run meanwhile.
  static constexpr int64_t kReleaseTokens = 64;
  const Backend& kernels;
  const DeviceType device;
  PagedAttentionParams params{};

  PagedAttention(int device, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                 const std::vector<int32_t>& heads, int32_t num_seqs, int dtype, int kv_dtype)
      : kernels(backend(static_cast<DeviceType>(device))), device(static_cast<DeviceType>(device)) {
    params.num_tokens = sizes.at(0);
    params.num_blocks = sizes.at(1);
    params.num_table_rows = sizes.at(2);
    params.max_blocks = sizes.at(3);
    params.out_token_stride = strides.at(0);
    params.out_head_stride = strides.at(1);
    params.query_token_stride = strides.at(2);
    params.query_head_stride = strides.at(3);
    params.block_table_stride = strides.at(4);
    params.num_query_heads = heads.at(0);
    params.num_kv_heads = heads.at(1);
    params.head_size = heads.at(2);
    params.block_size = heads.at(3);
    params.num_seqs = num_seqs;
    params.dtype = static_cast<DType>(dtype);
    params.kv_dtype = static_cast<KvDType>(kv_dtype);
  }

  // entry: 0 for what the plan chooses, 1 and 2 for the kernels of that name. addresses: in the order of
  // PagedAttentionParams, null for what is not given.
  void run(int entry, const std::vector<Address>& addresses, float scale, int32_t window, float soft_cap,
           const AttentionLaunch* launch, Address stream) const {
    PagedAttentionParams p = params;
    p.out = pointer<void>(addresses.at(0));
    p.query = pointer<void>(addresses.at(1));
    p.key_cache = pointer<void>(addresses.at(2));
    p.value_cache = pointer<void>(addresses.at(3));
    p.block_tables = pointer<int32_t>(addresses.at(4));
    p.seq_slots = pointer<int32_t>(addresses.at(5));
    p.query_start = pointer<int32_t>(addresses.at(6));
    p.context_lens = pointer<int32_t>(addresses.at(7));
    p.alibi_slopes = pointer<float>(addresses.at(8));
    p.sinks = pointer<float>(addresses.at(9));
    p.lse = pointer<float>(addresses.at(10));
    p.key_scale = pointer<float>(addresses.at(11));
    p.value_scale = pointer<float>(addresses.at(12));
    p.scale = scale;
    p.window = window;
    p.soft_cap = soft_cap;
    const auto function = entry == 0   ? kernels.paged_attention
                          : entry == 1 ? kernels.paged_attention_v1
                                       : kernels.paged_attention_v2;
    int error;
    if (device == DeviceType::kCpu && p.num_tokens > kReleaseTokens) {
      py::gil_scoped_release release;
      error = call(function, "paged_attention", &p, launch, pointer<void>(stream));
    } else {
      error = call(function, "paged_attention", &p, launch, pointer<void>(stream));
    }
    raise_on(kernels, error);
  }
};

// Thread blocks of the decode kernel that the current device runs at once.
int32_t attention_workers(int32_t num_query_heads, int32_t num_kv_heads, int32_t head_size, int dtype, int kv_dtype) {
  PagedAttentionParams p{};
  p.num_query_heads = num_query_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_size = head_size;
  p.dtype = static_cast<DType>(dtype);
  p.kv_dtype = static_cast<KvDType>(kv_dtype);
  const int32_t workers = call(cuda_functions().attention_workers, "attention_workers", &p);
  if (workers <= 0) raise_on(backend(DeviceType::kCuda), 1);
  return workers;
}

void merge_attention(int device, const std::vector<Address>& addresses, int64_t num_rows, int64_t head_size, int dtype,
                     Address stream) {
  MergeAttentionParams p{};
  p.out = pointer<void>(addresses.at(0));
  p.lse = pointer<float>(addresses.at(1));
  p.a = pointer<void>(addresses.at(2));
  p.lse_a = pointer<float>(addresses.at(3));
  p.b = pointer<void>(addresses.at(4));
  p.lse_b = pointer<float>(addresses.at(5));
  p.num_rows = num_rows;
  p.head_size = head_size;
  p.dtype = static_cast<DType>(dtype);
  const Backend& kernels = backend(static_cast<DeviceType>(device));
  raise_on(kernels, call(kernels.merge_attention, "merge_attention", &p, pointer<void>(stream)));
}

}  // namespace

void bind_attention(py::module_& module) {
  py::class_<AttentionPlanResult>(module, "AttentionPlanResult")
      .def_readonly("plan_ints", &AttentionPlanResult::plan_ints)
      .def_readonly("workspace_bytes", &AttentionPlanResult::workspace_bytes)
      .def_readonly("version", &AttentionPlanResult::version)
      .def_readonly("has_decode", &AttentionPlanResult::has_decode)
      .def_readonly("has_prefill", &AttentionPlanResult::has_prefill);
  py::class_<AttentionLaunch>(module, "AttentionLaunch").def(py::init(&make_launch));
  py::class_<PagedAttention>(module, "PagedAttention")
      .def(py::init<int, std::vector<int64_t>, std::vector<int64_t>, std::vector<int32_t>, int32_t, int, int>())
      .def("run", &PagedAttention::run);
  module.def("plan_attention", &plan_attention);
  module.def("attention_plan_capacity", &attention_plan_capacity);
  module.def("attention_workers", &attention_workers);
  module.def("merge_attention", &merge_attention);
}

}  // namespace pagemill::bindings
