// Norms, rotary embedding, KV storage, activations, lookups and block copies.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "backend.h"
#include "bind.h"
#include "pagemill/kernels.h"

namespace py = pybind11;

namespace pagemill::bindings {
namespace {

struct RmsNorm {
  const Backend& kernels;
  RmsNormParams params{};

  // strides: rows of out, x and residual. dtypes: of out and weight, of x, of the residual.
  RmsNorm(int device, int64_t num_tokens, int64_t hidden, const std::vector<int64_t>& strides,
          const std::vector<int>& dtypes)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_tokens = num_tokens;
    params.hidden = hidden;
    params.out_stride = strides.at(0);
    params.x_stride = strides.at(1);
    params.residual_stride = strides.at(2);
    params.dtype = static_cast<DType>(dtypes.at(0));
    params.x_dtype = static_cast<DType>(dtypes.at(1));
    params.residual_dtype = static_cast<DType>(dtypes.at(2));
  }

  void run(Address out, Address x, Address residual, Address weight, float epsilon, Address stream) const {
    RmsNormParams p = params;
    p.out = pointer<void>(out);
    p.x = pointer<void>(x);
    p.residual = pointer<void>(residual);
    p.weight = pointer<void>(weight);
    p.epsilon = epsilon;
    raise_on(kernels, call(kernels.rms_norm, "rms_norm", &p, pointer<void>(stream)));
  }
};

struct Rotary {
  const Backend& kernels;
  RotaryParams params{};

  Rotary(int device, int64_t num_tokens, int64_t max_positions, const std::vector<int64_t>& strides,
         const std::vector<int32_t>& heads, bool positions_are_int64, int layout, int dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
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

  void run(Address q, Address k, Address positions, Address cos_sin, Address stream) const {
    const RotaryParams p = with(q, k, positions, cos_sin);
    raise_on(kernels, call(kernels.rotary, "rotary", &p, pointer<void>(stream)));
  }
};

struct StoreKv {
  const Backend& kernels;
  StoreKvParams params{};

  // strides: tokens and heads of key, then of value. heads: KV heads, head size, block size.
  StoreKv(int device, int64_t num_tokens, int64_t num_blocks, const std::vector<int64_t>& strides,
          const std::vector<int32_t>& heads, int dtype, int kv_dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_tokens = num_tokens;
    params.num_blocks = num_blocks;
    params.key_token_stride = strides.at(0);
    params.key_head_stride = strides.at(1);
    params.value_token_stride = strides.at(2);
    params.value_head_stride = strides.at(3);
    params.num_kv_heads = heads.at(0);
    params.head_size = heads.at(1);
    params.block_size = heads.at(2);
    params.dtype = static_cast<DType>(dtype);
    params.kv_dtype = static_cast<KvDType>(kv_dtype);
  }

  StoreKvParams with(Address key, Address value, Address key_cache, Address value_cache, Address slots,
                     Address key_scale, Address value_scale) const {
    StoreKvParams p = params;
    p.key = pointer<void>(key);
    p.value = pointer<void>(value);
    p.key_cache = pointer<void>(key_cache);
    p.value_cache = pointer<void>(value_cache);
    p.slot_mapping = pointer<int64_t>(slots);
    p.key_scale = pointer<float>(key_scale);
    p.value_scale = pointer<float>(value_scale);
    return p;
  }

  void run(Address key, Address value, Address key_cache, Address value_cache, Address slots, Address key_scale,
           Address value_scale, Address stream) const {
    const StoreKvParams p = with(key, value, key_cache, value_cache, slots, key_scale, value_scale);
    raise_on(kernels, call(kernels.store_kv, "store_kv", &p, pointer<void>(stream)));
  }
};

struct RopeAndStore {
  Rotary rotary;
  StoreKv store;
  int64_t key_offset_bytes, value_offset_bytes;

  void run(Address qkv, Address positions, Address cos_sin, Address key_cache, Address value_cache, Address slots,
           Address key_scale, Address value_scale, Address stream) const {
    const Address key = qkv + static_cast<Address>(key_offset_bytes);
    const Address value = qkv + static_cast<Address>(value_offset_bytes);
    const RotaryParams r = rotary.with(qkv, key, positions, cos_sin);
    const StoreKvParams s = store.with(key, value, key_cache, value_cache, slots, key_scale, value_scale);
    const Backend& kernels = store.kernels;
    raise_on(kernels, call(kernels.rope_and_store, "rope_and_store", &r, &s, pointer<void>(stream)));
  }
};

struct ActivationAndMul {
  const Backend& kernels;
  ActivationParams params{};

  ActivationAndMul(int device, int64_t num_tokens, int64_t size, int64_t out_stride, int64_t gate_up_stride,
                   int activation, int dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_tokens = num_tokens;
    params.size = size;
    params.out_stride = out_stride;
    params.gate_up_stride = gate_up_stride;
    params.activation = static_cast<Activation>(activation);
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address out, Address gate_up, Address stream) const {
    ActivationParams p = params;
    p.out = pointer<void>(out);
    p.gate_up = pointer<void>(gate_up);
    raise_on(kernels, call(kernels.activation_and_mul, "activation_and_mul", &p, pointer<void>(stream)));
  }
};

struct GatherRows {
  const Backend& kernels;
  GatherRowsParams params{};

  // sizes: rows of out, rows of table, bytes of a table row. stride_bytes: of out and table.
  GatherRows(int device, const std::vector<int64_t>& sizes, const std::vector<int64_t>& stride_bytes,
             bool ids_are_int64, bool is_widening, int dtype)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_rows = sizes.at(0);
    params.num_table_rows = sizes.at(1);
    params.row_bytes = sizes.at(2);
    params.out_stride_bytes = stride_bytes.at(0);
    params.table_stride_bytes = stride_bytes.at(1);
    params.ids_are_int64 = ids_are_int64;
    params.is_widening = is_widening;
    params.dtype = static_cast<DType>(dtype);
  }

  void run(Address out, Address table, Address ids, Address stream) const {
    GatherRowsParams p = params;
    p.out = pointer<void>(out);
    p.table = pointer<void>(table);
    p.ids = pointer<void>(ids);
    raise_on(kernels, call(kernels.gather_rows, "gather_rows", &p, pointer<void>(stream)));
  }
};

void copy_blocks(int device, const std::vector<Address>& caches, const std::vector<int64_t>& sources,
                 const std::vector<int64_t>& destinations, int64_t num_blocks, int64_t block_bytes, Address stream) {
  CopyBlocksParams p{};
  p.caches = reinterpret_cast<void* const*>(caches.data());
  p.sources = sources.data();
  p.destinations = destinations.data();
  p.num_caches = static_cast<int64_t>(caches.size());
  p.num_copies = static_cast<int64_t>(sources.size());
  p.num_blocks = num_blocks;
  p.block_bytes = block_bytes;
  const Backend& kernels = backend(static_cast<DeviceType>(device));
  raise_on(kernels, call(kernels.copy_blocks, "copy_blocks", &p, pointer<void>(stream)));
}

// num_blocks: of a cache and of its copy in host memory.
void swap_blocks(int device, const std::vector<Address>& caches, const std::vector<Address>& host_caches,
                 const std::vector<int64_t>& blocks, const std::vector<int64_t>& host_blocks,
                 const std::vector<int64_t>& num_blocks, int64_t block_bytes, int direction, Address stream) {
  SwapBlocksParams p{};
  p.caches = reinterpret_cast<void* const*>(caches.data());
  p.host_caches = reinterpret_cast<void* const*>(host_caches.data());
  p.blocks = blocks.data();
  p.host_blocks = host_blocks.data();
  p.num_caches = static_cast<int64_t>(caches.size());
  p.num_copies = static_cast<int64_t>(blocks.size());
  p.num_blocks = num_blocks.at(0);
  p.num_host_blocks = num_blocks.at(1);
  p.block_bytes = block_bytes;
  p.direction = static_cast<SwapDirection>(direction);
  const Backend& kernels = backend(static_cast<DeviceType>(device));
  raise_on(kernels, call(kernels.swap_blocks, "swap_blocks", &p, pointer<void>(stream)));
}

void dequantize(Address out, Address blocks, int64_t num_blocks, int type) {
  const DequantizeParams p = {pointer<float>(out), pointer<void>(blocks), num_blocks, static_cast<BlockType>(type)};
  int error;
  {
    py::gil_scoped_release release;
    error = pagemill_dequantize(&p);
  }
  raise_on(backend(DeviceType::kCpu), error);
}

}  // namespace

void bind_rows(py::module_& module) {
  py::class_<RmsNorm>(module, "RmsNorm")
      .def(py::init<int, int64_t, int64_t, std::vector<int64_t>, std::vector<int>>())
      .def("run", &RmsNorm::run);
  py::class_<Rotary>(module, "Rotary")
      .def(py::init<int, int64_t, int64_t, std::vector<int64_t>, std::vector<int32_t>, bool, int, int>())
      .def("run", &Rotary::run);
  py::class_<StoreKv>(module, "StoreKv")
      .def(py::init<int, int64_t, int64_t, std::vector<int64_t>, std::vector<int32_t>, int, int>())
      .def("run", &StoreKv::run);
  py::class_<RopeAndStore>(module, "RopeAndStore")
      .def(py::init(
          [](const Rotary& rotary, const StoreKv& store, int64_t key_offset_bytes, int64_t value_offset_bytes) {
            return RopeAndStore{rotary, store, key_offset_bytes, value_offset_bytes};
          }))
      .def("run", &RopeAndStore::run);
  py::class_<ActivationAndMul>(module, "ActivationAndMul")
      .def(py::init<int, int64_t, int64_t, int64_t, int64_t, int, int>())
      .def("run", &ActivationAndMul::run);
  py::class_<GatherRows>(module, "GatherRows")
      .def(py::init<int, std::vector<int64_t>, std::vector<int64_t>, bool, bool, int>())
      .def("run", &GatherRows::run);
  module.def("copy_blocks", &copy_blocks);
  module.def("swap_blocks", &swap_blocks);
  module.def("dequantize", &dequantize);
}

}  // namespace pagemill::bindings
