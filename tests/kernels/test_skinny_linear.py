"""Products of few rows on CUDA against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker import kernels
from worker.kernels.skinny_linear import MAX_ROWS, SkinnyGateUp, SkinnyLinear, skinny_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = (torch.bfloat16, torch.float16)
# num_outputs, num_inputs: single ones, fewer outputs than multiprocessors, ragged tiles and depths, layers of models.
SHAPES = ((1, 8), (1, 4096), (7, 64), (31, 40), (130, 72), (1000, 1000), (4097, 1032), (257, 14336), (6144, 4096))

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), float("nan"), device="cuda", dtype=weight.dtype)
    skinny_linear(out, x, weight)
    return out


def assert_close(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within float32 rounding of a sum of num_inputs terms of size one, plus one rounding to the output's dtype."""
    relative = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[actual.dtype]
    absolute = 2e-6 * max(x.shape[1], 16)
    torch.testing.assert_close(actual.double(), x.double() @ weight.double().T, rtol=relative, atol=absolute)


@each_dtype
@each_shape
def test_product_is_right_for_every_row_count(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape, dtype=dtype)
    for num_rows in range(1, MAX_ROWS + 1):
        x = random(num_rows, shape[1], dtype=dtype)
        assert_close(product(x, weight), x, weight)


@each_dtype
@each_shape
def test_a_gated_product_is_right_for_every_row_count(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    num_outputs, num_inputs = shape
    weight = random(2 * num_outputs, num_inputs, dtype=dtype) / num_inputs**0.5
    gated = SkinnyGateUp(weight)
    for num_rows in range(1, MAX_ROWS + 1):
        x = random(num_rows, num_inputs, dtype=dtype)
        out = torch.full((num_rows, num_outputs), float("nan"), device="cuda", dtype=dtype)
        gated(out, x)
        gate, up = (x.double() @ weight.double().T).split(num_outputs, dim=1)
        relative = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(out.double(), torch.nn.functional.silu(gate) * up, rtol=relative, atol=1e-5)


def test_a_product_reads_what_the_kernel_before_it_writes() -> None:
    """Launches that follow at once, each on what the one before made, against launches that are waited for."""
    hidden, inner = 2048, 4096
    weights = [random(hidden, hidden) / hidden**0.5 for _ in range(4)]
    gate_ups = [random(2 * inner, hidden) / hidden**0.5 for _ in range(4)]
    downs = [random(hidden, inner) / inner**0.5 for _ in range(4)]
    norm = random(hidden)
    buffer = {"dtype": torch.bfloat16, "device": "cuda"}

    def run(start: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        residual, activated = start.clone(), torch.zeros(4, inner, **buffer)
        normed, summand = start.to(torch.bfloat16), torch.zeros(4, hidden, **buffer)
        for plain, gated, down in zip(weights, gate_ups, downs, strict=True):
            SkinnyLinear(plain)(summand, normed)
            wait()
            kernels.fused_add_rms_norm(normed, summand, residual, norm, 1e-5)
            wait()
            SkinnyGateUp(gated)(activated, normed)
            wait()
            SkinnyLinear(down)(summand, activated)
            wait()
            kernels.fused_add_rms_norm(normed, summand, residual, norm, 1e-5)
            wait()
        return residual

    for _ in range(5):
        start = torch.randn(4, hidden, device="cuda")
        assert torch.equal(run(start, lambda: None), run(start, torch.cuda.synchronize))


@each_dtype
@each_shape
def test_a_row_depends_neither_on_its_batch_nor_on_its_place(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = random(*shape, dtype=dtype)
    x = random(MAX_ROWS, shape[1], dtype=dtype)
    whole = product(x, weight)
    for num_rows in range(1, MAX_ROWS):
        assert torch.equal(product(x[-num_rows:], weight), whole[-num_rows:])


def test_infinite_and_nan_rows_spoil_no_other_row() -> None:
    weight, x = random(4096, 4096), random(8, 4096)
    clean = product(x, weight)
    x[3], x[6] = float("inf"), float("nan")
    spoiled = product(x, weight)
    untouched = [0, 1, 2, 4, 5, 7]
    assert torch.equal(spoiled[untouched], clean[untouched])
    assert not spoiled[[3, 6]].isfinite().any()


def test_rows_may_be_strided_and_what_lies_between_stays() -> None:
    weight = random(1000, 4096)
    x = random(5, 4096 + 24)[:, 16:-8]
    buffer = torch.full((5, 1000 + 3), float("nan"), device="cuda", dtype=torch.bfloat16)
    skinny_linear(buffer[:, 1:-2], x, weight)
    assert_close(buffer[:, 1:-2], x, weight)
    assert buffer[:, 0].isnan().all()
    assert buffer[:, -2:].isnan().all()


def test_replays_in_a_graph_see_new_rows() -> None:
    weight, x = random(4096, 4096), random(4, 4096)
    linear = SkinnyLinear(weight)
    out = torch.empty(4, 4096, device="cuda", dtype=torch.bfloat16)
    linear(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(out, x)
    for _ in range(3):
        x.copy_(random(4, 4096))
        graph.replay()
        assert_close(out, x, weight)


def test_an_empty_product_writes_nothing() -> None:
    skinny_linear(torch.empty(0, 64, device="cuda", dtype=torch.bfloat16), random(0, 128), random(64, 128))


@pytest.mark.parametrize(
    ("out_shape", "x_shape", "weight_shape", "named"),
    [
        ((17, 64), (17, 128), (64, 128), "at most 16"),
        ((2, 64), (2, 100), (64, 100), "num_inputs"),
        ((2, 64), (2, 128), (64, 136), "num_inputs"),
        ((2, 63), (2, 128), (64, 128), "num_outputs"),
        ((3, 64), (2, 128), (64, 128), "num_rows"),
    ],
)
def test_wrong_shapes_are_named(
    out_shape: tuple[int, int], x_shape: tuple[int, int], weight_shape: tuple[int, int], named: str
) -> None:
    out = torch.empty(out_shape, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=named):
        skinny_linear(out, random(*x_shape), random(*weight_shape))


def test_rows_that_are_not_aligned_are_named() -> None:
    weight, out = random(64, 128), torch.empty(2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x_stride"):
        skinny_linear(out, random(2, 132)[:, :128], weight)
    with pytest.raises(ValueError, match="x is not aligned"):
        skinny_linear(out, random(2, 136)[:, 1:129], weight)
    with pytest.raises(ValueError, match="weight is not aligned"):
        skinny_linear(out, random(2, 128), random(64 * 128 + 1)[1:].view(64, 128))


def test_other_dtypes_are_named() -> None:
    x, out = random(2, 128, dtype=torch.float32), torch.empty(2, 64, device="cuda")
    with pytest.raises(TypeError, match="float32"):
        skinny_linear(out, x, random(64, 128, dtype=torch.float32))


def test_a_gated_weight_with_an_odd_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="has 5 rows"):
        SkinnyGateUp(random(5, 64))


def test_it_is_advised_for_no_product_that_was_not_measured_to_gain() -> None:
    assert not kernels.SkinnyLinear(random(4096, 4096)).wins(MAX_ROWS + 1)
    assert not kernels.SkinnyLinear(random(64, 64)).wins(1)
