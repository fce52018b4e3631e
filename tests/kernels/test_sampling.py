import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker import kernels
from worker.kernels import SamplingBatch


def draw(logits: torch.Tensor, batch: SamplingBatch, num_top: int = 0) -> dict[str, torch.Tensor]:
    with logits.device:
        return draw_here(logits, batch, num_top)


def draw_here(logits: torch.Tensor, batch: SamplingBatch, num_top: int) -> dict[str, torch.Tensor]:
    rows = logits.shape[0]
    out = {
        "out_ids": torch.full((rows,), -7),
        "out_status": torch.full((rows,), -7, dtype=torch.int32),
        "out_logprobs": torch.zeros(rows),
        "out_ranks": torch.zeros(rows, dtype=torch.int32),
        "out_top_ids": torch.zeros(rows, num_top, dtype=torch.int32),
        "out_top_logprobs": torch.zeros(rows, num_top),
    }
    workspace = kernels.sampling_workspace(rows, logits.shape[1], logits.dtype, logits.device, num_top=num_top)
    kernels.sample(logits, batch, **out, workspace=workspace)
    return out


def on_device(batch: SamplingBatch, device: str) -> SamplingBatch:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return SamplingBatch(**{name: None if t is None else t.to(device) for name, t in tensors.items()})


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def allowed_by_transformers(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Probabilities in float64, by the processors in the order in which generate() applies them."""
    scores = TemperatureLogitsWarper(temperature)(None, logits.double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)[0]


def test_greedy_takes_the_first_of_equal_logits(device: str, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 4999).to(dtype)
    logits[0, 17] = logits[0, 4998] = 50
    logits[1, 4998] = 60
    logits[2, 0] = 60
    out = draw(logits, SamplingBatch())
    assert out["out_ids"].tolist() == [17, 4998, 0, *logits[3:].float().argmax(-1).tolist()]
    assert out["out_status"].tolist() == [0] * 5
    assert torch.equal(draw(logits, SamplingBatch(temperature=torch.full((5,), 9e-6)))["out_ids"], out["out_ids"])


def test_logprobs_and_ranks_are_of_the_raw_distribution(device: str, dtype: torch.dtype) -> None:
    logits = (torch.randn(3, 49152) * 3).to(dtype)
    batch = SamplingBatch(
        temperature=floats(2.0, 0.5, 0.0), seeds=torch.tensor([1, 2, 3]), bias_offsets=ints(0, 0, 0, 1),
        bias_ids=ints(77), bias_values=floats(100.0),
    )  # fmt: skip
    out = draw(logits, batch, num_top=6)
    expected = logits.double().log_softmax(-1)
    chosen = expected.gather(1, out["out_ids"][:, None])[:, 0]
    assert out["out_ids"][2] == 77
    torch.testing.assert_close(out["out_logprobs"].double(), chosen, rtol=1e-5, atol=1e-5)
    ranks = 1 + (logits > logits.gather(1, out["out_ids"][:, None])).sum(-1)
    assert out["out_ranks"].tolist() == ranks.tolist()
    top = expected.topk(6)
    torch.testing.assert_close(out["out_top_logprobs"].double(), top.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.gather(1, out["out_top_ids"].long()), logits.gather(1, top.indices))


def test_logprobs_are_clamped(device: str) -> None:
    logits = torch.full((1, 10), -math.inf)
    logits[0, 3] = 1.0
    out = draw(logits, SamplingBatch(), num_top=2)
    assert out["out_ids"].tolist() == [3]
    assert out["out_top_logprobs"].tolist() == [[0.0, -9999.0]]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 900]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 0.001]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    device=st.sampled_from(["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]),
)
def test_draws_are_the_inverse_transform_of_transformers_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, spread: float, device: str
) -> None:
    vocab = 1000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread
    probabilities = allowed_by_transformers(logits, temperature, top_k, top_p, min_p)
    rows = 16
    batch = SamplingBatch(
        temperature=torch.full((rows,), temperature), top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p), min_p=torch.full((rows,), min_p),
        seeds=torch.full((rows,), seed), positions=torch.arange(rows),
    )  # fmt: skip
    ids = draw(logits.expand(rows, vocab).contiguous().to(device), on_device(batch, device))["out_ids"]
    upper = probabilities.cumsum(0)
    for position, token in enumerate(ids.tolist()):
        uniform = philox_uniform(seed, position)
        # A boundary case may fall on either side in float32.
        assert upper[token] - probabilities[token] - 1e-5 <= uniform <= upper[token] + 1e-5
        assert probabilities[token] > 0 or top_p < 1


def philox_uniform(seed: int, position: int) -> float:
    """Philox 4x32-10 as published, on Python integers."""
    counter = [position & 0xFFFFFFFF, position >> 32, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return (((counter[1] << 32) | counter[0]) >> 11) * 2.0**-53


def test_draws_follow_the_distribution(device: str) -> None:
    rows, probabilities = 20000, np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32).expand(rows, 6).contiguous()
    batch = SamplingBatch(temperature=torch.ones(rows), seeds=torch.full((rows,), 42), positions=torch.arange(rows))
    counts = np.bincount(draw(logits, batch)["out_ids"].cpu().numpy(), minlength=6)
    chi_square = ((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum()
    assert chi_square < 20.5  # 99.9th percentile with 5 degrees of freedom


def test_a_draw_does_not_depend_on_the_batch(device: str) -> None:
    logits = torch.randn(12, 5000) * 2
    values = {
        "temperature": torch.rand(12) + 0.2,
        "top_k": torch.randint(0, 60, (12,), dtype=torch.int32),
        "top_p": torch.rand(12) * 0.9 + 0.1,
        "seeds": torch.randint(0, 2**60, (12,)),
        "positions": torch.randint(0, 4000, (12,)),
    }
    together = draw(logits, SamplingBatch(**values))["out_ids"]
    order = torch.randperm(12)
    shuffled = draw(logits[order], SamplingBatch(**{k: v[order] for k, v in values.items()}))["out_ids"]
    alone = [draw(logits[i : i + 1], SamplingBatch(**{k: v[i : i + 1] for k, v in values.items()})) for i in range(12)]
    assert torch.equal(shuffled, together[order])
    assert [int(a["out_ids"]) for a in alone] == together.tolist()


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty_matches_transformers(device: str, penalty: float) -> None:
    vocab = 300
    logits = torch.randn(40, vocab) * 2
    prompt, output = torch.randint(0, vocab, (40, 60)), torch.randint(0, vocab, (40, 90))
    history = torch.cat([prompt, output], 1)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits.clone()).argmax(-1)
    batch = SamplingBatch(
        repetition_penalty=torch.full((40,), penalty),
        prompt_offsets=torch.arange(41, dtype=torch.int32) * 60, prompt_ids=prompt.flatten().int(),
        output_offsets=torch.arange(41, dtype=torch.int32) * 90, output_ids=output.flatten().int(),
    )  # fmt: skip
    assert torch.equal(draw(logits, batch)["out_ids"], expected)


def test_presence_and_frequency_count_the_output_alone(device: str) -> None:
    logits = torch.zeros(4, 8)
    logits[:, 2], logits[:, 5], logits[:, 6] = 3.0, 2.5, 2.0
    batch = SamplingBatch(
        presence_penalty=floats(0.6, 0.0, 0.0, 0.4), frequency_penalty=floats(0.0, 0.2, 0.1, 0.1),
        prompt_offsets=ints(0, 3, 3, 3, 3), prompt_ids=ints(5, 5, 5),
        output_offsets=ints(0, 1, 4, 6, 8), output_ids=ints(2, 2, 2, 2, 2, 2, 2, 2),
    )  # fmt: skip
    # 3 - 0.6 < 2.5; 3 - 3 * 0.2 < 2.5; 3 - 2 * 0.1 > 2.5; 3 - 0.4 - 2 * 0.1 < 2.5
    assert draw(logits, batch)["out_ids"].tolist() == [5, 5, 2, 5]


def test_lists_with_ends_may_lie_anywhere_in_a_table_of_histories(device: str) -> None:
    rows, vocab, longest = 12, 200, 60
    history = torch.randint(0, vocab, (rows, longest), dtype=torch.int32)
    prompt_lens, output_lens = torch.randint(0, 30, (rows,)), torch.randint(0, 30, (rows,))
    order = torch.randperm(rows)
    starts = (order * longest).int()
    middles, ends = starts + prompt_lens.int(), starts + (prompt_lens + output_lens).int()
    parameters = {
        "presence_penalty": torch.rand(rows), "frequency_penalty": torch.rand(rows),
        "repetition_penalty": 1 + torch.rand(rows), "temperature": torch.ones(rows), "seeds": torch.arange(rows),
    }  # fmt: skip
    logits = torch.randn(rows, vocab)
    table = SamplingBatch(
        **parameters, prompt_offsets=starts, prompt_ends=middles, prompt_ids=history.view(-1), output_offsets=middles,
        output_ends=ends, output_ids=history.view(-1),
    )  # fmt: skip
    prompts = [history.view(-1)[a:b] for a, b in zip(starts.tolist(), middles.tolist(), strict=True)]
    outputs = [history.view(-1)[a:b] for a, b in zip(middles.tolist(), ends.tolist(), strict=True)]
    zero = torch.zeros(1, dtype=torch.int32)
    packed = SamplingBatch(
        **parameters, prompt_offsets=torch.cat([zero, prompt_lens.cumsum(0).int()]), prompt_ids=torch.cat(prompts),
        output_offsets=torch.cat([zero, output_lens.cumsum(0).int()]), output_ids=torch.cat(outputs),
    )  # fmt: skip
    assert torch.equal(draw(logits, table, num_top=1)["out_ids"], draw(logits, packed)["out_ids"])
    no_penalties = SamplingBatch(temperature=parameters["temperature"], seeds=parameters["seeds"])
    assert not torch.equal(draw(logits, table)["out_ids"], draw(logits, no_penalties)["out_ids"])


def test_masked_ids_are_never_sampled_and_bias_is_added(device: str) -> None:
    logits = torch.zeros(64, 5)
    batch = SamplingBatch(
        temperature=torch.ones(64), seeds=torch.arange(64), masked_offsets=torch.arange(65, dtype=torch.int32) * 2,
        masked_ids=ints(1, 3).repeat(64), bias_offsets=torch.arange(65, dtype=torch.int32),
        bias_ids=torch.full((64,), 4, dtype=torch.int32), bias_values=torch.full((64,), -100.0),
    )  # fmt: skip
    assert set(draw(logits, batch)["out_ids"].tolist()) == {0, 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_with_nan_or_infinity_fail_alone(device: str, dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randn(6, 777).to(dtype)
    logits[0, 776] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, :700] = -math.inf
    out = draw(logits, SamplingBatch(temperature=torch.full((6,), temperature)), num_top=2)
    assert out["out_status"].tolist() == [1, 1, 1, 0, 0, 0]
    assert out["out_ids"][:3].tolist() == [0, 0, 0]
    assert out["out_ids"][3] >= 700


def test_masking_every_id_fails_the_row(device: str) -> None:
    batch = SamplingBatch(masked_offsets=ints(0, 3), masked_ids=ints(0, 1, 2))
    assert draw(torch.zeros(1, 3), batch)["out_status"].tolist() == [1]


def test_token_logprobs_match_float64(device: str, dtype: torch.dtype) -> None:
    logits, ids = torch.randn(7, 3000).to(dtype), torch.randint(0, 3000, (7,))
    logprobs, ranks, status = torch.zeros(7), torch.zeros(7, dtype=torch.int32), torch.zeros(7, dtype=torch.int32)
    top_ids, top = torch.zeros(7, 4, dtype=torch.int32), torch.zeros(7, 4)
    workspace = kernels.sampling_workspace(7, 3000, dtype, device, num_top=4)
    kernels.token_logprobs(logits, ids, logprobs, ranks, status, top_ids, top, workspace=workspace)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    assert ranks.tolist() == (1 + (logits > logits.gather(1, ids[:, None])).sum(-1)).tolist()
    torch.testing.assert_close(top.double(), expected.topk(4).values, rtol=1e-5, atol=1e-5)
    assert status.tolist() == [0] * 7


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_k": torch.zeros(2)}, "top_k is float32; supported: int32"),
        ({"temperature": torch.zeros(3)}, r"temperature has shape \[3\]; expected \[num_rows=2\]"),
        ({"masked_offsets": ints(0, 1, 1), "masked_ids": ints(50)}, "masked id 50 is outside the vocabulary of 50"),
        ({"masked_offsets": ints(0, 9, 9), "masked_ids": ints(5)}, "masked_offsets end at 9, past 1 masked_ids"),
        ({"masked_offsets": ints(0, 1, 0), "masked_ids": ints(5)}, "masked offsets descend at row 1"),
        ({"prompt_ids": ints(5)}, "prompt_offsets and prompt_ids go together"),
        ({"output_ends": ints(1, 1)}, "output_offsets and output_ids go together"),
        (
            {"output_offsets": ints(0, 0), "output_ends": ints(0, 2), "output_ids": ints(5)},
            "output_ends end at 2, past 1 output_ids",
        ),
        (
            {"output_offsets": ints(0, 1), "output_ends": ints(1, 0), "output_ids": ints(5)},
            "output offsets descend at row 1",
        ),
        ({"output_offsets": ints(0, 1), "output_ids": ints(5)}, r"output_offsets has shape \[2\]; expected"),
    ],
)
def test_bad_input_is_refused_by_name(parameters: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        draw(torch.zeros(2, 50), SamplingBatch(**parameters))
