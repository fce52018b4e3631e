"""Products on packed weights against float64."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from worker import kernels
from worker.kernels.linear import PackedGateUp, PackedLinear, linear

ISAS = ("portable", "avx2", "avx512", "avx512bf16", "amx")
AVAILABLE_ISAS = ISAS[: ISAS.index(kernels.best_cpu_isa()) + 1]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROW_COUNTS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 200)
# out_features, in_features: whole blocks, ragged edges in both, a single weight, depths with a tail of 1 and of 2.
SHAPES = ((96, 576), (33, 31), (70, 577), (1, 1), (5, 66), (64, 2050))

each_isa = pytest.mark.parametrize("isa", AVAILABLE_ISAS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@pytest.fixture(autouse=True)
def _restored_threads() -> Iterator[None]:
    before = kernels.num_threads()
    torch.manual_seed(7)
    yield
    kernels.set_num_threads(before)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, in_features: int) -> None:
    """Within float32 rounding of a sum of in_features terms of size one, plus one rounding to the output's dtype."""
    tolerance = 2e-6 * max(in_features, 16)
    relative = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=tolerance)


@each_isa
@each_dtype
@each_shape
def test_product_is_right_for_every_row_count(isa: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0])
    packed = PackedLinear(weight, bias, isa=isa)
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, shape[1]).to(dtype)
        for out_dtype in {dtype, torch.float32}:
            out = torch.empty(num_rows, shape[0], dtype=out_dtype)
            packed(x, out)
            assert_close(out, exact(x, weight, bias), shape[1])


@each_isa
@each_dtype
@each_shape
def test_a_row_depends_neither_on_its_batch_nor_on_threads(
    isa: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    packed = PackedLinear(torch.randn(shape).to(dtype), isa=isa)
    x = torch.randn(max(ROW_COUNTS), shape[1]).to(dtype)
    whole = torch.empty(len(x), shape[0])
    packed(x, whole)
    for num_threads in (1, 2):
        kernels.set_num_threads(num_threads)
        for num_rows in ROW_COUNTS:
            out = torch.empty(num_rows, shape[0])
            packed(x[-num_rows:], out)
            assert torch.equal(out, whole[-num_rows:])


@each_isa
@each_dtype
def test_more_rows_than_a_chunk_holds(isa: str, dtype: torch.dtype) -> None:
    weight, x = torch.randn(40, 70).to(dtype), torch.randn(1100, 70).to(dtype)
    out = torch.empty(1100, 40)
    PackedLinear(weight, isa=isa)(x, out)
    assert_close(out, exact(x, weight), 70)


@each_isa
@each_dtype
def test_strided_rows_leave_their_neighbours_alone(isa: str, dtype: torch.dtype) -> None:
    weight = torch.randn(37, 45).to(dtype)
    x_wide = torch.full((19, 64), float("nan")).to(dtype)
    x_wide[:, 3:48] = torch.randn(19, 45)
    out_wide = torch.full((19, 50), 5.0).to(dtype)
    PackedLinear(weight, isa=isa)(x_wide[:, 3:48], out_wide[:, 6:43])
    assert_close(out_wide[:, 6:43], exact(x_wide[:, 3:48], weight), 45)
    assert bool((out_wide[:, :6] == 5).all()) and bool((out_wide[:, 43:] == 5).all())


@each_isa
@each_dtype
def test_accumulate_adds_in_float32_and_rounds_once(isa: str, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(70, 100).to(dtype), torch.randn(70)
    x, residual = torch.randn(21, 100).to(dtype), torch.randn(21, 70).to(dtype)
    packed = PackedLinear(weight, bias, isa=isa)
    product, out = torch.empty(21, 70), residual.clone()
    packed(x, product)
    packed.accumulate(x, out)
    assert torch.equal(out, (residual.float() + product).to(dtype))


@each_isa
@each_dtype
@pytest.mark.parametrize("out_features", [16, 48, 21])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_gate_up_is_silu_of_gate_times_up(isa: str, dtype: torch.dtype, out_features: int, has_bias: bool) -> None:
    weight = torch.randn(2 * out_features, 64).div(8).to(dtype)
    bias = torch.randn(2 * out_features) if has_bias else None
    packed = PackedGateUp(weight, bias, isa=isa)
    for num_rows in (1, 5, 40):
        x, out = torch.randn(num_rows, 64).to(dtype), torch.empty(num_rows, out_features, dtype=dtype)
        packed(x, out)
        gate, up = exact(x, weight, bias).chunk(2, dim=1)
        assert_close(out, torch.nn.functional.silu(gate) * up, 64)


def test_silu_survives_large_gates() -> None:
    weight = torch.cat([torch.full((16, 1), 1000.0), torch.ones(16, 1)])
    out = torch.empty(2, 16)
    linear(PackedGateUp(weight), torch.tensor([[1.0], [-1.0]]), out)
    torch.testing.assert_close(out, torch.tensor([1000.0, 0.0])[:, None].expand(2, 16), rtol=0, atol=1e-30)


@each_isa
@each_dtype
def test_unpack_gives_the_weight_back(isa: str, dtype: torch.dtype) -> None:
    weight = torch.randn(74, 51).to(dtype)
    assert torch.equal(PackedLinear(weight, isa=isa).unpack(), weight)
    assert torch.equal(PackedGateUp(weight, isa=isa).unpack(), weight)


@each_isa
def test_not_a_number_stays_in_its_row(isa: str) -> None:
    x = torch.randn(20, 40).bfloat16()
    x[7, 3] = float("nan")
    out = torch.empty(20, 33)
    PackedLinear(torch.randn(33, 40).bfloat16(), isa=isa)(x, out)
    assert out[7].isnan().all()
    assert out[torch.arange(20) != 7].isfinite().all()


def test_weight_that_is_a_transposed_view() -> None:
    weight = torch.randn(40, 24).T
    x, out = torch.randn(3, 40), torch.empty(3, 24)
    PackedLinear(weight)(x, out)
    assert_close(out, exact(x, weight), 40)


def test_callers_on_several_threads_share_the_pool() -> None:
    kernels.set_num_threads(2)
    weight, x = torch.randn(960, 576), torch.randn(8, 40, 576)
    packed, outs = PackedLinear(weight), torch.empty(8, 40, 960)
    with ThreadPoolExecutor(4) as executor:
        for _ in range(20):
            list(executor.map(packed, x, outs))
    for index in range(8):
        assert_close(outs[index], exact(x[index], weight), 576)


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    kernels.set_num_threads(2)
    weight, x = torch.randn(960, 576), torch.randn(40, 576)
    packed, before, after = PackedLinear(weight), torch.empty(40, 960), torch.empty(40, 960)
    packed(x, before)
    # The child may not touch torch's own OpenMP pool, which does not survive a fork.
    expected, actual = before.numpy(), after.numpy()
    child = os.fork()
    if child == 0:
        packed(x, after)
        os._exit(0 if kernels.num_threads() == 2 and expected.tobytes() == actual.tobytes() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_rows_is_no_work() -> None:
    PackedLinear(torch.randn(8, 8))(torch.empty(0, 8), torch.empty(0, 8))


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (torch.empty(2, 7), torch.empty(2, 6)),
        (torch.empty(2, 8), torch.empty(2, 5)),
        (torch.empty(2, 8), torch.empty(3, 6)),
        (torch.empty(2, 8, dtype=torch.float16), torch.empty(2, 6)),
        (torch.empty(2, 8), torch.empty(2, 6, dtype=torch.bfloat16)),
        (torch.empty(8, 2).T, torch.empty(2, 6)),
        (torch.empty(2, 8), torch.empty(6, 2).T),
        (torch.empty(2, 8), torch.empty(1, 6).expand(2, 6)),
    ],
    ids=["depth", "columns", "rows", "x dtype", "out dtype", "x step", "out step", "overlapping rows"],
)
def test_arguments_that_do_not_fit_are_refused(x: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"x must be|rows must not overlap"):
        PackedLinear(torch.randn(6, 8))(x, out)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        PackedLinear(torch.randn(6))
    with pytest.raises(ValueError, match="weight"):
        PackedLinear(torch.ones(6, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match="weight"):
        PackedLinear(torch.empty(0, 8))
    with pytest.raises(ValueError, match="bias"):
        PackedLinear(torch.randn(6, 8), torch.randn(5))
    with pytest.raises(ValueError, match="gate"):
        PackedGateUp(torch.randn(7, 8))
    with pytest.raises(ValueError, match="portable, avx2"):
        PackedLinear(torch.randn(6, 8), isa="sse9")
