// A step's tokens from histories and block tables, and the changes to those.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "backend.h"
#include "bind.h"

namespace py = pybind11;

namespace pagemill::bindings {
namespace {

struct PrepareStep {
  const Backend& kernels;
  PrepareStepParams params{};

  // sizes: tokens, sequences, slots, positions and blocks of a slot. strides: rows of history and block_table.
  PrepareStep(int device, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int32_t block_size)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.num_tokens = sizes.at(0);
    params.num_seqs = sizes.at(1);
    params.num_slots = sizes.at(2);
    params.max_model_len = sizes.at(3);
    params.max_blocks = sizes.at(4);
    params.history_stride = strides.at(0);
    params.block_table_stride = strides.at(1);
    params.block_size = block_size;
  }

  // Addresses in the order of PrepareStepParams' pointers.
  void run(const std::vector<Address>& addresses, Address stream) const {
    PrepareStepParams p = params;
    p.token_ids = pointer<int32_t>(addresses.at(0));
    p.positions = pointer<int32_t>(addresses.at(1));
    p.slot_mapping = pointer<int64_t>(addresses.at(2));
    p.history = pointer<int32_t>(addresses.at(3));
    p.block_table = pointer<int32_t>(addresses.at(4));
    p.seq_slots = pointer<int32_t>(addresses.at(5));
    p.query_start = pointer<int32_t>(addresses.at(6));
    p.context_lens = pointer<int32_t>(addresses.at(7));
    raise_on(kernels, call(kernels.prepare_step, "prepare_step", &p, pointer<void>(stream)));
  }
};

struct Scatter {
  const Backend& kernels;
  ScatterParams params{};

  Scatter(int device, int64_t target_size, int64_t num_values, bool values_are_int64)
      : kernels(backend(static_cast<DeviceType>(device))) {
    params.target_size = target_size;
    params.num_values = num_values;
    params.values_are_int64 = values_are_int64;
  }

  void run(Address target, Address indices, Address values, Address stream) const {
    ScatterParams p = params;
    p.target = pointer<int32_t>(target);
    p.indices = pointer<int64_t>(indices);
    p.values = pointer<void>(values);
    raise_on(kernels, call(kernels.scatter, "scatter", &p, pointer<void>(stream)));
  }
};

}  // namespace

void bind_step(py::module_& module) {
  py::class_<PrepareStep>(module, "PrepareStep")
      .def(py::init<int, std::vector<int64_t>, std::vector<int64_t>, int32_t>())
      .def("run", &PrepareStep::run);
  py::class_<Scatter>(module, "Scatter").def(py::init<int, int64_t, int64_t, bool>()).def("run", &Scatter::run);
}

}  // namespace pagemill::bindings
