// pybind11 face of program.h. worker/kernels/program.py validates the tensors and keeps them alive.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bind.h"
#include "pagemill/program.h"

namespace py = pybind11;

namespace pagemill {
namespace {

using Address = uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void add_embedding(Program& program, Address out, Address table, int64_t num_table_rows, int64_t hidden,
                   int64_t out_stride, int dtype, bool is_widening) {
  GatherRowsParams p{};
  p.dtype = static_cast<DType>(dtype);
  const int64_t bytes = dtype_bytes(p.dtype);
  p.out = pointer<void>(out);
  p.table = pointer<void>(table);
  p.num_table_rows = num_table_rows;
  p.row_bytes = p.table_stride_bytes = hidden * bytes;
  p.out_stride_bytes = out_stride * (is_widening ? dtype_bytes(DType::kFloat32) : bytes);
  p.is_widening = is_widening;
  program.add(p);
}

// residual: 0 for none.
void add_rms_norm(Program& program, Address out, Address x, Address residual, Address weight, int64_t hidden,
                  const std::vector<int64_t>& strides, float epsilon, int dtype, bool is_wide) {
  RmsNormParams p{};
  p.out = pointer<void>(out);
  p.x = pointer<void>(x);
  p.residual = pointer<void>(residual);
  p.weight = pointer<void>(weight);
  p.hidden = hidden;
  p.out_stride = strides.at(0);
  p.x_stride = strides.at(1);
  p.residual_stride = strides.at(2);
  p.epsilon = epsilon;
  p.dtype = static_cast<DType>(dtype);
  p.x_dtype = p.residual_dtype = is_wide ? DType::kFloat32 : p.dtype;
  program.add(p);
}

void add_linear(Program& program, const PackedLinear& linear, Address x, int64_t x_stride, Address out,
                int64_t out_stride, int out_dtype, int epilogue) {
  program.add(LinearCall{&linear, pointer<void>(x), pointer<void>(out), x_stride, out_stride,
                         static_cast<DType>(out_dtype), static_cast<LinearEpilogue>(epilogue)});
}

// heads: query heads, key-value heads, head size, rotated dimensions, block size.
void add_rope_and_store(Program& program, Address qkv, int64_t row_stride, Address key_cache, Address value_cache,
                        int64_t num_blocks, const std::vector<int32_t>& heads, int layout, int dtype, int kv_dtype,
                        Address key_scale, Address value_scale) {
  RopeAndStoreCall c{};
  const int32_t head_size = heads.at(2);
  c.rotary.dtype = c.store.dtype = static_cast<DType>(dtype);
  const int64_t head_bytes = head_size * dtype_bytes(c.rotary.dtype);
  const Address key = qkv + static_cast<Address>(heads.at(0) * head_bytes);
  c.rotary.q = pointer<void>(qkv);
  c.rotary.k = pointer<void>(key);
  c.rotary.q_token_stride = c.rotary.k_token_stride = row_stride;
  c.rotary.q_head_stride = c.rotary.k_head_stride = head_size;
  c.rotary.num_query_heads = heads.at(0);
  c.rotary.num_kv_heads = c.store.num_kv_heads = heads.at(1);
  c.rotary.head_size = c.store.head_size = head_size;
  c.rotary.rot_dim = heads.at(3);
  c.rotary.layout = static_cast<RotaryLayout>(layout);
  c.store.key = c.rotary.k;
  c.store.value = pointer<void>(key + static_cast<Address>(heads.at(1) * head_bytes));
  c.store.key_cache = pointer<void>(key_cache);
  c.store.value_cache = pointer<void>(value_cache);
  c.store.num_blocks = num_blocks;
  c.store.key_token_stride = c.store.value_token_stride = row_stride;
  c.store.key_head_stride = c.store.value_head_stride = head_size;
  c.store.block_size = heads.at(4);
  c.store.kv_dtype = static_cast<KvDType>(kv_dtype);
  c.store.key_scale = pointer<float>(key_scale);
  c.store.value_scale = pointer<float>(value_scale);
  program.add(c);
}

// strides: tokens and heads of out, tokens and heads of query. heads: query heads, key-value heads, head size, block
// size.
void add_paged_attention(Program& program, Address out, Address query, Address key_cache, Address value_cache,
                         int64_t num_blocks, const std::vector<int64_t>& strides, const std::vector<int32_t>& heads,
                         float scale, int32_t window, float soft_cap, int dtype, int kv_dtype, Address key_scale,
                         Address value_scale) {
  PagedAttentionParams p{};
  p.out = pointer<void>(out);
  p.query = pointer<void>(query);
  p.key_cache = pointer<void>(key_cache);
  p.value_cache = pointer<void>(value_cache);
  p.num_blocks = num_blocks;
  p.out_token_stride = strides.at(0);
  p.out_head_stride = strides.at(1);
  p.query_token_stride = strides.at(2);
  p.query_head_stride = strides.at(3);
  p.num_query_heads = heads.at(0);
  p.num_kv_heads = heads.at(1);
  p.head_size = heads.at(2);
  p.block_size = heads.at(3);
  p.scale = scale;
  p.window = window;
  p.soft_cap = soft_cap;
  p.dtype = static_cast<DType>(dtype);
  p.kv_dtype = static_cast<KvDType>(kv_dtype);
  p.key_scale = pointer<float>(key_scale);
  p.value_scale = pointer<float>(value_scale);
  program.add(p);
}

// addresses: in the order of StepInputs; sizes: tokens, positions, table rows, blocks per table row, stride of table
// rows, sequences. The whole run is without the interpreter lock, so that threads which talk to the network go on.
void run(const Program& program, const std::vector<Address>& addresses, const std::vector<int64_t>& sizes,
         Address elapsed_ns) {
  StepInputs s{};
  s.token_ids = pointer<int32_t>(addresses.at(0));
  s.positions = pointer<int32_t>(addresses.at(1));
  s.cos_sin = pointer<float>(addresses.at(2));
  s.slot_mapping = pointer<int64_t>(addresses.at(3));
  s.block_tables = pointer<int32_t>(addresses.at(4));
  s.seq_slots = pointer<int32_t>(addresses.at(5));
  s.query_start = pointer<int32_t>(addresses.at(6));
  s.context_lens = pointer<int32_t>(addresses.at(7));
  s.num_tokens = sizes.at(0);
  s.num_positions = sizes.at(1);
  s.num_table_rows = sizes.at(2);
  s.max_blocks = sizes.at(3);
  s.block_table_stride = sizes.at(4);
  s.num_seqs = static_cast<int32_t>(sizes.at(5));
  py::gil_scoped_release release;
  program.run(s, pointer<int64_t>(elapsed_ns));
}

}  // namespace

namespace bindings {

void bind_program(py::module_& module) {
  py::class_<Program>(module, "Program")
      .def(py::init<int64_t>())
      .def("add_embedding", &add_embedding)
      .def("add_rms_norm", &add_rms_norm)
      .def("add_linear", &add_linear)
      .def("add_rope_and_store", &add_rope_and_store)
      .def("add_paged_attention", &add_paged_attention)
      .def("run", &run)
      .def_property_readonly("num_calls", &Program::num_calls);
}

}  // namespace bindings
}  // namespace pagemill
