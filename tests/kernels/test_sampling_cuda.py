"""Sampling on CUDA: the CPU's tokens, for any mix of parameters."""

import math

import pytest
import torch

from worker import kernels
from worker.kernels import SamplingBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Weights and their order are the same on both devices, sums are in double precision: a token may differ only where a
# draw or a share of the mass is within 1e-12 of a boundary, which random rows never are.
LOGPROB_TOLERANCE = 1e-5


def pick(
    generator: torch.Generator, rows: int, choices: list[float], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return torch.tensor(choices, dtype=dtype)[torch.randint(0, len(choices), (rows,), generator=generator)]


def id_lists(generator: torch.Generator, rows: int, vocab: int, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists with repeated ids."""
    lengths = torch.randint(0, longest + 1, (rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    distinct = torch.randint(0, vocab, (rows, max(1, longest // 4)), generator=generator)
    places = torch.randint(0, distinct.shape[1], (int(offsets[-1]),), generator=generator)
    row_of_place = torch.repeat_interleave(torch.arange(rows), lengths)
    return offsets, distinct[row_of_place, places].int()


def random_batch(generator: torch.Generator, rows: int, vocab: int, seed: int) -> SamplingBatch:
    batch = SamplingBatch(
        temperature=pick(generator, rows, [0, 0.1, 0.3, 0.7, 1, 1.7, 5]),
        top_k=pick(generator, rows, [0, 0, 1, 2, 50, 128, 129, 900, 1500, 20000], torch.int32),
        top_p=pick(generator, rows, [1, 1, 0.999, 0.9, 0.5, 0.1, 0.001, 0]),
        min_p=pick(generator, rows, [0, 0, 0, 0.01, 0.1, 0.5]),
        seeds=torch.randint(0, 2**62, (rows,), generator=generator),
        positions=torch.randint(0, 10**6, (rows,), generator=generator),
    )
    if seed % 2:
        batch.presence_penalty = pick(generator, rows, [0, 0.5, -1])
        batch.frequency_penalty = pick(generator, rows, [0, 0.3, 1.1])
        batch.repetition_penalty = pick(generator, rows, [1, 1.3, 0.7])
        batch.prompt_offsets, batch.prompt_ids = id_lists(generator, rows, vocab, 300)
        batch.output_offsets, batch.output_ids = id_lists(generator, rows, vocab, 3000)
    if seed % 4 > 1:
        batch.masked_offsets, batch.masked_ids = id_lists(generator, rows, vocab, 40)
        batch.bias_offsets = torch.arange(rows + 1, dtype=torch.int32) * min(vocab, 5)
        ids = [torch.randperm(vocab, generator=generator)[:5] for _ in range(rows)]
        batch.bias_ids = torch.cat(ids).int()
        batch.bias_values = torch.randn(len(batch.bias_ids), generator=generator) * 5
    return batch


def random_logits(generator: torch.Generator, rows: int, vocab: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=generator) * [1, 0.1, 4, 10, 0, 30][seed % 6]
    if seed % 5 == 1:
        logits = logits.round()
    if seed % 7 == 2:
        logits[:, vocab // 3 :] = -math.inf
    if seed % 7 == 3:
        logits[:, vocab // 2 :] = -60000
    if rows > 10:
        logits[3, -1], logits[4, 0], logits[5] = math.nan, math.inf, -math.inf
    return logits.to([torch.float32, torch.bfloat16, torch.float16][(seed // 2) % 3])


def outputs(rows: int, num_top: int, device: str) -> dict[str, torch.Tensor]:
    return {
        "out_ids": torch.full((rows,), -7, device=device),
        "out_status": torch.full((rows,), -7, dtype=torch.int32, device=device),
        "out_logprobs": torch.zeros(rows, device=device),
        "out_ranks": torch.zeros(rows, dtype=torch.int32, device=device),
        "out_top_ids": torch.zeros(rows, num_top, dtype=torch.int32, device=device),
        "out_top_logprobs": torch.zeros(rows, num_top, device=device),
    }


def moved(batch: SamplingBatch) -> SamplingBatch:
    tensors = {name: getattr(batch, name) for name in SamplingBatch.__slots__}
    return SamplingBatch(**{name: None if t is None else t.cuda() for name, t in tensors.items()})


@pytest.mark.parametrize("has_logprobs", [False, True])
@pytest.mark.parametrize(
    ("vocab", "rows"),
    [(1, 20), (5, 200), (1000, 300), (32000, 60), (128256, 40), (128251, 12), (128256, 1), (300001, 6), (1100000, 2)],
)
def test_tokens_equal_those_of_the_cpu(vocab: int, rows: int, has_logprobs: bool) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(1000 * seed + vocab)
        logits = random_logits(generator, rows, vocab, seed)
        batch = random_batch(generator, rows, vocab, seed)
        num_top = [1, 5, 20][seed % 3]
        expected, actual = outputs(rows, num_top, "cpu"), outputs(rows, num_top, "cuda")
        if not has_logprobs:
            expected, actual = ({name: out[name] for name in ("out_ids", "out_status")} for out in (expected, actual))
        kernels.sample(logits, batch, **expected)
        workspace = kernels.sampling_workspace(rows, vocab, logits.dtype, "cuda", num_top=num_top)
        kernels.sample(logits.cuda(), moved(batch), **actual, workspace=workspace)
        for name, values in expected.items():
            if values.dtype is torch.float32:
                torch.testing.assert_close(actual[name].cpu(), values, rtol=LOGPROB_TOLERANCE, atol=LOGPROB_TOLERANCE)
            else:
                assert torch.equal(actual[name].cpu(), values), (name, seed)


def test_strided_rows_of_any_alignment_are_read() -> None:
    wide = torch.randn(9, 5011)
    logits = wide[:, 3:5002]
    batch = SamplingBatch(temperature=torch.ones(9), seeds=torch.arange(9), top_p=torch.full((9,), 0.9))
    expected, actual = outputs(9, 3, "cpu"), outputs(9, 3, "cuda")
    kernels.sample(logits, batch, **expected)
    workspace = kernels.sampling_workspace(9, 4999, torch.float32, "cuda", num_top=3)
    kernels.sample(wide.cuda()[:, 3:5002], moved(batch), **actual, workspace=workspace)
    assert torch.equal(actual["out_ids"].cpu(), expected["out_ids"])
    assert torch.equal(actual["out_top_ids"].cpu(), expected["out_top_ids"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [0, 1, 3, 7])
def test_rows_of_any_alignment_are_listed(dtype: torch.dtype, first: int) -> None:
    vocab = 33001
    wide = torch.randn(9, vocab + 10).to(dtype)
    # The largest entries where rows begin and end.
    wide[:3, first : first + 20] += 5
    wide[3:6, first + vocab - 20 : first + vocab] += 5
    logits = wide[:, first : first + vocab]
    batch = SamplingBatch(
        temperature=torch.tensor([0.0, 1, 1] * 3), top_k=torch.tensor([0, 1, 20] * 3, dtype=torch.int32),
        seeds=torch.arange(9),
    )  # fmt: skip
    expected, actual = torch.zeros(9, dtype=torch.int64), torch.zeros(9, dtype=torch.int64, device="cuda")
    status = torch.zeros(9, dtype=torch.int32)
    kernels.sample(logits, batch, expected, status)
    workspace = kernels.sampling_workspace(9, vocab, dtype, "cuda")
    on_device = wide.cuda()[:, first : first + vocab]
    kernels.sample(on_device, moved(batch), actual, status.cuda(), workspace=workspace)
    assert torch.equal(actual.cpu(), expected)


def test_rows_whose_list_is_too_long_are_drawn_all_the_same() -> None:
    logits = torch.randn(12, 50000).round()  # a few distinct values
    logits[:4] = 1.0
    logits[4] = logits[4].sort().values
    batch = SamplingBatch(
        temperature=torch.tensor([0.0, 1] * 6), top_k=torch.full((12,), 50, dtype=torch.int32), seeds=torch.arange(12)
    )
    expected, actual = torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64, device="cuda")
    status = torch.zeros(12, dtype=torch.int32)
    kernels.sample(logits, batch, expected, status)
    workspace = kernels.sampling_workspace(64, 50000, torch.float32, "cuda")
    for rows in (12, 5, 12):  # one workspace for steps of different sizes
        part = SamplingBatch(
            temperature=batch.temperature[:rows].cuda(), top_k=batch.top_k[:rows].cuda(),
            seeds=batch.seeds[:rows].cuda(),
        )  # fmt: skip
        kernels.sample(logits[:rows].cuda(), part, actual[:rows], status[:rows].cuda(), workspace=workspace)
        assert torch.equal(actual[:rows].cpu(), expected[:rows])


def test_a_captured_launch_reads_new_logits_and_parameters() -> None:
    logits, workspace = (
        torch.zeros(8, 32000, device="cuda"),
        kernels.sampling_workspace(8, 32000, torch.float32, "cuda"),
    )
    batch = SamplingBatch(
        temperature=torch.ones(8, device="cuda"), top_k=torch.full((8,), 40, dtype=torch.int32, device="cuda"),
        seeds=torch.zeros(8, dtype=torch.int64, device="cuda"),
        positions=torch.zeros(8, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    ids, status = torch.zeros(8, dtype=torch.int64, device="cuda"), torch.zeros(8, dtype=torch.int32, device="cuda")
    kernels.sample(logits, batch, ids, status, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sample(logits, batch, ids, status, workspace=workspace)
    for position in range(3):
        logits.copy_(torch.randn(8, 32000))
        batch.positions.fill_(position)
        graph.replay()
        direct = torch.zeros_like(ids)
        kernels.sample(logits, batch, direct, status, workspace=workspace)
        assert torch.equal(direct, ids)
