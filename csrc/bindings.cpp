// pybind11 face: integers and pointers in, nothing decided here. worker/kernels/__init__.py validates the tensors.
//
// Each class holds the shapes, strides and dtype of one validated combination; run() takes what changes from call to
// call. Small kernels keep the GIL: taking it back can cost more than the kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "pagemill/cpu_features.h"
#include "pagemill/kernels.h"
#include "pagemill/thread_pool.h"

namespace py = pybind11;
using namespace pagemill;

void bind_linear(py::module_& module);
void bind_program(py::module_& module);

namespace {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void raise_on(int error) {
  if (error != 0) throw py::value_error(pagemill_last_error());
}

struct RmsNorm {
  RmsNormParams params{};

  RmsNorm(int64_t num_tokens, int64_t hidden, int64_t out_stride, int64_t x_stride, int64_t residual_stride, int dtype,
          bool is_wide) {
    params.num_tokens = num_tokens;
    params.hidden = hidden;
    params.out_stride = out_stride;
    params.x_stride = x_stride;
    params.residual_stride = residual_stride;
    params.dtype = static_cast<DType>(dtype);
    params.is_wide = is_wide;
  }

  void run(Address out, Address x, Address residual, Address weight, float epsilon) const {
    RmsNormParams p = params;
    p.out = pointer<void>(out);
    p.x = pointer<void>(x);
    p.residual = pointer<void>(residual);
    p.weight = pointer<void>(weight);
    p.epsilon = epsilon;
    raise_on(pagemill_rms_norm(&p));
  }
};

struct Rotary {
  RotaryParams params{};

  Rotary(int64_t num_tokens, int64_t max_positions, std::vector<int64_t> strides, std::vector<int32_t> heads,
         bool positions_are_int64, int layout, int dtype) {
    params.num_tokens = num_tokens;
    params.max_positions = max_positions;
    params.q_token_stride = strides.at(0);
    params.q_head_stride = strides.at(1);
    params.k_token_stride = strides.at(2);
    params.k_head_stride = strides.at(3);
    params.num_query_heads = heads.at(0);
    params.num_kv_heads = heads.at(1);
    params.head_size = heads.at(2);
    params.rot_dim = heads.at(3);
    params.positions_are_int64 = positions_are_int64;
    params.layout = static_cast<RotaryLayout>(layout);
    params.dtype = static_cast<DType>(dtype);
  }

  RotaryParams with(Address q, Address k, Address positions, Address cos_sin) const {
    RotaryParams p = params;
    p.q = pointer<void>(q);
    p.k = pointer<void>(k);
    p.positions = pointer<void>(positions);
    p.cos_sin = pointer<float>(cos_sin);
    return p;
  }

  void run(Address q, Address k, Address positions, Address cos_sin) const {
    const RotaryParams p = with(q, k, positions, cos_sin);
    raise_on(pagemill_rotary(&p));
  }
};

struct StoreKv {
  StoreKvParams params{};

  StoreKv(int64_t num_tokens, int64_t num_blocks, std::vector<int64_t> strides, int32_t num_kv_heads, int32_t head_size,
          int32_t block_size, int dtype) {
    params.num_tokens = num_tokens;
    params.num_blocks = num_blocks;
    params.key_token_stride = strides.at(0);
    params.key_head_stride = strides.at(1);
    params.value_token_stride = strides.at(2);
    params.value_head_stride = strides.at(3);
    params.num_kv_heads = num_kv_heads;
    params.head_size = head_size;
    params.block_size = block_size;
    params.dtype = static_cast<DType>(dtype);
  }

  StoreKvParams with(Address key, Address value, Address key_cache, Address value_cache, Address slots) const {
    StoreKvParams p = params;
    p.key = pointer<void>(key);
    p.value = pointer<void>(value);
    p.key_cache = pointer<void>(key_cache);
    p.value_cache = pointer<void>(value_cache);
    p.slot_mapping = pointer<int64_t>(slots);
    return p;
  }

  void run(Address key, Address value, Address key_cache, Address value_cache, Address slots) const {
    const StoreKvParams p = with(key, value, key_cache, value_cache, slots);
    raise_on(pagemill_store_kv(&p));
  }
};

struct RopeAndStore {
  Rotary rotary;
  StoreKv store;
  int64_t key_offset_bytes, value_offset_bytes;

  void run(Address qkv, Address positions, Address cos_sin, Address key_cache, Address value_cache,
           Address slots) const {
    const Address key = qkv + static_cast<Address>(key_offset_bytes);
    const RotaryParams r = rotary.with(qkv, key, positions, cos_sin);
    const StoreKvParams s =
        store.with(key, qkv + static_cast<Address>(value_offset_bytes), key_cache, value_cache, slots);
    raise_on(pagemill_rope_and_store(&r, &s));
  }
};

struct PagedAttention {
  // More query rows than this may take milliseconds: other Python threads run meanwhile.
  static constexpr int64_t kReleaseTokens = 64;
  PagedAttentionParams params{};

  PagedAttention(std::vector<int64_t> sizes, std::vector<int64_t> strides, std::vector<int32_t> heads, int32_t num_seqs,
                 int dtype) {
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
  }

  void run(Address out, Address query, Address key_cache, Address value_cache, Address block_tables, Address seq_slots,
           Address query_start, Address context_lens, float scale, int32_t window, float soft_cap, Address alibi_slopes,
           Address sinks, Address lse) const {
    PagedAttentionParams p = params;
    p.out = pointer<void>(out);
    p.query = pointer<void>(query);
    p.key_cache = pointer<void>(key_cache);
    p.value_cache = pointer<void>(value_cache);
    p.block_tables = pointer<int32_t>(block_tables);
    p.seq_slots = pointer<int32_t>(seq_slots);
    p.query_start = pointer<int32_t>(query_start);
    p.context_lens = pointer<int32_t>(context_lens);
    p.scale = scale;
    p.window = window;
    p.soft_cap = soft_cap;
    p.alibi_slopes = pointer<float>(alibi_slopes);
    p.sinks = pointer<float>(sinks);
    p.lse = pointer<float>(lse);
    int error;
    if (p.num_tokens > kReleaseTokens) {
      py::gil_scoped_release release;
      error = pagemill_paged_attention(&p);
    } else {
      error = pagemill_paged_attention(&p);
    }
    raise_on(error);
  }
};

struct ActivationAndMul {
  ActivationParams params{};

  ActivationAndMul(int64_t num_tokens, int64_t size, int64_t out_stride, int64_t gate_up_stride, int activation,
                   int dtype) {
    params.num_tokens = num_tokens;
    params.size = size;
    params.out_stride = out_stride;
    params.gate_up_stride = gate_up_stride;
    params.activation = static_cast<Activation>(activation);
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address out, Address gate_up) const {
    ActivationParams p = params;
    p.out = pointer<void>(out);
    p.gate_up = pointer<void>(gate_up);
    raise_on(pagemill_activation_and_mul(&p));
  }
};

struct GatherRows {
  GatherRowsParams params{};

  GatherRows(int64_t num_rows, int64_t num_table_rows, int64_t row_bytes, int64_t out_stride_bytes,
             int64_t table_stride_bytes, bool ids_are_int64, bool is_widening, int dtype) {
    params.num_rows = num_rows;
    params.num_table_rows = num_table_rows;
    params.row_bytes = row_bytes;
    params.out_stride_bytes = out_stride_bytes;
    params.table_stride_bytes = table_stride_bytes;
    params.ids_are_int64 = ids_are_int64;
    params.is_widening = is_widening;
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address out, Address table, Address ids) const {
    GatherRowsParams p = params;
    p.out = pointer<void>(out);
    p.table = pointer<void>(table);
    p.ids = pointer<void>(ids);
    raise_on(pagemill_gather_rows(&p));
  }
};

void copy_blocks(const std::vector<Address>& caches, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int64_t num_blocks, int64_t block_bytes) {
  CopyBlocksParams p{};
  p.caches = reinterpret_cast<void* const*>(caches.data());
  p.sources = sources.data();
  p.destinations = destinations.data();
  p.num_caches = static_cast<int64_t>(caches.size());
  p.num_copies = static_cast<int64_t>(sources.size());
  p.num_blocks = num_blocks;
  p.block_bytes = block_bytes;
  raise_on(pagemill_copy_blocks(&p));
}

void dequantize(Address out, Address blocks, int64_t num_blocks, int type) {
  const DequantizeParams p = {pointer<float>(out), pointer<void>(blocks), num_blocks, static_cast<BlockType>(type)};
  int error;
  {
    py::gil_scoped_release release;
    error = pagemill_dequantize(&p);
  }
  raise_on(error);
}

struct Sample {
  SampleParams params{};

  Sample(int64_t num_rows, int64_t vocab_size, int64_t logits_stride, int32_t num_top, int dtype) {
    params.num_rows = num_rows;
    params.vocab_size = vocab_size;
    params.logits_stride = logits_stride;
    params.num_top = num_top;
    params.dtype = static_cast<DType>(dtype);
  }

  // Addresses in the order of SampleParams' pointers.
  void run(const std::vector<Address>& a) const {
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
    p.prompt_ids = pointer<int32_t>(next());
    p.output_offsets = pointer<int32_t>(next());
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
      error = pagemill_sample(&p);
    }
    raise_on(error);
  }
};

struct TokenLogprobs {
  TokenLogprobsParams params{};

  TokenLogprobs(int64_t num_rows, int64_t vocab_size, int64_t logits_stride, int32_t num_top, int dtype) {
    params.num_rows = num_rows;
    params.vocab_size = vocab_size;
    params.logits_stride = logits_stride;
    params.num_top = num_top;
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address logits, Address ids, Address out_logprobs, Address out_ranks, Address out_status,
           Address out_top_ids, Address out_top_logprobs) const {
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
      error = pagemill_token_logprobs(&p);
    }
    raise_on(error);
  }
};

void bind_platform(py::module_& module) {
  module.def("num_threads", &num_threads);
  module.def("set_num_threads", &set_num_threads);
  module.def("cpu_isa", [] { return std::string(cpu_isa_name(cpu_isa())); });
  module.def("best_cpu_isa", [] { return std::string(cpu_isa_name(best_cpu_isa())); });
  module.def("set_cpu_isa", [](const std::string& name) { set_cpu_isa(parse_cpu_isa(name)); });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.doc() = "Native CPU kernels of Pagemill; use worker.kernels, which validates its arguments.";
  bind_platform(module);
  py::class_<RmsNorm>(module, "RmsNorm")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, int, bool>())
      .def("run", &RmsNorm::run);
  py::class_<Rotary>(module, "Rotary")
      .def(py::init<int64_t, int64_t, std::vector<int64_t>, std::vector<int32_t>, bool, int, int>())
      .def("run", &Rotary::run);
  py::class_<StoreKv>(module, "StoreKv")
      .def(py::init<int64_t, int64_t, std::vector<int64_t>, int32_t, int32_t, int32_t, int>())
      .def("run", &StoreKv::run);
  py::class_<RopeAndStore>(module, "RopeAndStore")
      .def(py::init(
          [](const Rotary& rotary, const StoreKv& store, int64_t key_offset_bytes, int64_t value_offset_bytes) {
            return RopeAndStore{rotary, store, key_offset_bytes, value_offset_bytes};
          }))
      .def("run", &RopeAndStore::run);
  py::class_<PagedAttention>(module, "PagedAttention")
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, std::vector<int32_t>, int32_t, int>())
      .def("run", &PagedAttention::run);
  py::class_<ActivationAndMul>(module, "ActivationAndMul")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int, int>())
      .def("run", &ActivationAndMul::run);
  py::class_<GatherRows>(module, "GatherRows")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, int>())
      .def("run", &GatherRows::run);
  py::class_<Sample>(module, "Sample")
      .def(py::init<int64_t, int64_t, int64_t, int32_t, int>())
      .def("run", &Sample::run);
  py::class_<TokenLogprobs>(module, "TokenLogprobs")
      .def(py::init<int64_t, int64_t, int64_t, int32_t, int>())
      .def("run", &TokenLogprobs::run);
  module.def("copy_blocks", &copy_blocks);
  module.def("dequantize", &dequantize);
#if defined(PAGEMILL_HAVE_LINEAR)
  bind_linear(module);
  bind_program(module);
#endif
}
