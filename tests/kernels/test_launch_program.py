"""A program of launches computes what the native program does, on any device."""

from dataclasses import replace

import pytest
import torch
from program_layer import HEADS, KV_HEADS, MAX_TOKENS, SIZE, VOCAB, Layer, step_inputs

from worker.kernels import AttentionGeometry, plan_attention
from worker.kernels.execution import LaunchExecution
from worker.kernels.launch_program import LaunchProgram
from worker.kernels.step_inputs import StepInputs

PLACES = [pytest.param("cpu")]
if torch.cuda.is_available():
    PLACES.append(pytest.param("cuda", marks=pytest.mark.gpu))
# Both round each buffer to the dtype; the order of summands differs, and a difference of one unit goes through layers.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BATCHES = [([20], [20]), ([1, 9], [21, 9]), ([1, 1, 31], [22, 10, 31]), ([1], [23]), ([20], [20])]


def layer_on(place: str, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Layer:
    return Layer(dtype, kv_dtype, LaunchExecution(torch.device(place)), place)


def inputs_on(place: str, step: StepInputs, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> StepInputs:
    names = ("token_ids", "positions", "cos_sin", "slot_mapping", "block_table", "seq_slots", "query_start")
    moved = {name: getattr(step, name).to(place) for name in (*names, "context_lens")}
    if place == "cuda":
        geometry = AttentionGeometry(HEADS, KV_HEADS, SIZE, dtype, place, kv_dtype=kv_dtype)
        moved["attention_plans"] = {-1: plan_attention(step.query_start, step.context_lens, geometry)}
    return StepInputs(**moved)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=["same", "e4m3", "e5m2"])
def test_launches_compute_what_the_native_program_does(
    place: str, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    launched, native = layer_on(place, dtype, kv_dtype), Layer(dtype, kv_dtype)
    launch_program, native_program = launched.program(), native.program()
    assert isinstance(launch_program, LaunchProgram)
    # A number of an 8-bit cache may round to the next one, an eighth or a quarter away.
    tolerance = TOLERANCES[dtype] if kv_dtype is None else max(TOLERANCES[dtype], 1e-2)
    for counts, context_lens in BATCHES:
        step = step_inputs(counts, context_lens)
        native_program.run(step)
        launch_program.run(inputs_on(place, step, dtype, kv_dtype))
        for name in ("residual", "normed", "qkv", "attention", "activated", "keys", "values"):
            error = relative_error(getattr(launched, name), getattr(native, name))
            assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("place", PLACES)
def test_repeating_a_step_repeats_its_bits_whatever_ran_between(place: str) -> None:
    layer = layer_on(place, torch.float32)
    program = layer.program()
    steps = [inputs_on(place, step_inputs(*batch), torch.float32) for batch in BATCHES]
    program.run(steps[0])
    first = layer.residual[:20].clone()
    for step in steps[1:]:
        program.run(step)
    assert torch.equal(layer.residual[:20], first)


@pytest.mark.parametrize("place", PLACES)
def test_padding_tokens_leave_the_cache_and_the_other_tokens_alone(place: str) -> None:
    padded, plain = layer_on(place, torch.float32), layer_on(place, torch.float32)
    step = step_inputs([1, 9], [9, 9])
    plain.program().run(inputs_on(place, step, torch.float32))
    filler = torch.zeros(6, dtype=torch.int32)
    longer = replace(
        step,
        token_ids=torch.cat([step.token_ids, filler]),
        positions=torch.cat([step.positions, filler]),
        slot_mapping=torch.cat([step.slot_mapping, torch.full((6,), -1)]),
    )
    padded.program().run(inputs_on(place, longer, torch.float32))
    torch.testing.assert_close(padded.residual[:10], plain.residual[:10], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded.keys, plain.keys, rtol=1e-5, atol=1e-5)
    assert torch.equal(padded.keys == 0, plain.keys == 0)


@pytest.mark.parametrize("place", PLACES)
def test_numbers_of_tokens_beyond_those_that_stay_bound(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.kernels.launch_program._MAX_BOUND", 2)
    layer, reference = layer_on(place, torch.float32), Layer(torch.float32)
    program, native = layer.program(), reference.program()
    for count in (3, 5, 7, 3, 5):
        step = step_inputs([count], [count])
        program.run(inputs_on(place, step, torch.float32))
        native.run(step)
        assert relative_error(layer.residual[:count], reference.residual[:count]) < 2e-5


@pytest.mark.parametrize("place", PLACES)
def test_calls_run_between_kernels_and_times_are_kept_per_kind(place: str) -> None:
    layer, seen = layer_on(place, torch.float32), []
    program = LaunchExecution(torch.device(place)).program(MAX_TOKENS, SIZE)
    program.embedding(layer.residual, layer.table)
    program.call(lambda rows: seen.append(rows.clone()), layer.residual)
    program.fused_add_rms_norm(layer.normed, layer.normed, layer.residual, layer.norm, 1e-5)
    step = inputs_on(place, step_inputs([2, 3], [2, 3]), torch.float32)
    program.run(step)
    assert torch.equal(seen[0], layer.table[:5])
    assert layer.normed[:5].abs().sum() > 0
    times = program.time(step)
    assert set(times) == {"embedding", "call", "fused_add_rms_norm"}
    assert all(elapsed_ns >= 0 for elapsed_ns in times.values())


BAD_STEPS = [
    ("token_ids", torch.tensor([1, 2]), TypeError, "token_ids must be contiguous .T. of torch.int32"),
    ("token_ids", torch.tensor([1, VOCAB], dtype=torch.int32), ValueError, "ids.1. is 40"),
    ("positions", torch.tensor([1], dtype=torch.int32), ValueError, "positions must be contiguous"),
    ("cos_sin", torch.zeros(32, 32), ValueError, "cos_sin must be contiguous"),
    ("query_start", torch.tensor([0], dtype=torch.int32), ValueError, "query_start must be contiguous"),
    ("context_lens", torch.tensor([1], dtype=torch.int32), ValueError, "context_lens.0. is 1"),
    ("slot_mapping", torch.zeros(2, dtype=torch.int64, device="meta"), TypeError, "slot_mapping is on meta"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), BAD_STEPS)
def test_a_wrong_input_is_named(name: str, value: torch.Tensor, error: type[Exception], message: str) -> None:
    program = layer_on("cpu", torch.float32).program()
    with pytest.raises(error, match=message):
        program.run(replace(step_inputs([2], [2]), **{name: value}))


@pytest.mark.parametrize("place", PLACES)
def test_more_tokens_than_the_buffers_hold_are_refused(place: str) -> None:
    program = layer_on(place, torch.float32).program()
    with pytest.raises(ValueError, match="num_tokens is 41, the buffers hold 40"):
        program.run(inputs_on(place, step_inputs([20, 21], [20, 21]), torch.float32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_missing_attention_plan_is_named() -> None:
    program = layer_on("cuda", torch.float32).program()
    step = replace(inputs_on("cuda", step_inputs([2], [2]), torch.float32), attention_plans={})
    with pytest.raises(ValueError, match="no plan for window -1"):
        program.run(step)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_run_can_be_captured_in_a_graph(narrow: torch.dtype) -> None:
    layer, plain = layer_on("cuda", narrow), layer_on("cuda", narrow)
    program, step = layer.program(), inputs_on("cuda", step_inputs([1, 9], [9, 9]), narrow)
    program.run(step)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    allocated = []
    for graph in graphs:  # with the first one the library of products takes memory for the stream
        with torch.cuda.graph(graph):
            program.run(step)
        allocated.append(torch.cuda.memory_allocated())
    layer.residual.zero_()
    graphs[1].replay()
    plain.program().run(step)
    torch.cuda.synchronize()
    assert torch.equal(layer.residual[:10], plain.residual[:10])
    assert allocated[0] == allocated[1]


def test_wrong_buffers_are_refused_when_added() -> None:
    layer = layer_on("cpu", torch.bfloat16)
    program = layer.execution.program(MAX_TOKENS, SIZE)
    with pytest.raises(ValueError, match="x has 4 rows"):
        program.linear(layer.qkv_weight, layer.normed[:4], layer.qkv[:4])
    with pytest.raises(ValueError, match="x must be"):
        program.linear(layer.qkv_weight, layer.normed.float(), layer.qkv)
    with pytest.raises(ValueError, match="qkv has shape"):
        program.rope_and_store(layer.qkv, layer.keys, layer.values, HEADS + 1, KV_HEADS)
    with pytest.raises(TypeError, match="key_cache is bfloat16"):
        program.rope_and_store(layer.qkv.float(), layer.keys, layer.values, HEADS, KV_HEADS)
    with pytest.raises(ValueError, match="out has shape"):
        program.rms_norm(layer.normed[:, :8], layer.residual, layer.norm, 1e-5)
    with pytest.raises(ValueError, match="out has shape"):
        program.embedding(layer.residual[:3], layer.table)
