"""A KV cache in 8 bits with the demo model: how far log-probabilities move, and that decode reads what prefill does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from worker_harness import Driver, prompt_logprobs_of, runner_for

from worker.model_runner import ModelRunner

# Against a float32 cache, over the test prompts: nats by which the log-probability of a token moves on average, and by
# which that of all of them together gets worse. Measured: 0.105 and 0.042 for e4m3, 0.179 and 0.094 for e5m2.
TOLERANCES = {"fp8": (0.2, 0.1), "fp8_e5m2": (0.3, 0.2)}


@pytest.fixture(scope="module")
def exact(demo_prompts: list[list[int]]) -> npt.NDArray[np.float64]:
    return logprobs(runner_for(""), demo_prompts)


@pytest.fixture(scope="module", params=TOLERANCES)
def setting(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(setting: str) -> Iterator[ModelRunner]:
    yield runner_for("", kv_cache_dtype=setting)


def logprobs(runner: ModelRunner, prompts: list[list[int]]) -> npt.NDArray[np.float64]:
    return np.concatenate([prompt_logprobs_of(runner, prompt).chosen for prompt in prompts])


def test_log_probabilities_stay_close(
    runner: ModelRunner, setting: str, exact: npt.NDArray[np.float64], demo_prompts: list[list[int]]
) -> None:
    per_token, together = TOLERANCES[setting]
    moved = logprobs(runner, demo_prompts) - exact
    assert 0.001 < np.abs(moved).mean() < per_token
    assert abs(moved.mean()) < together


def test_decode_reads_what_prefill_does(runner: ModelRunner, demo_prompts: list[list[int]]) -> None:
    prompts = demo_prompts[:2]
    driver = Driver(runner)
    for prompt in prompts:
        driver.add(prompt)
    for prompt, output in zip(prompts, driver.generate(12), strict=True):
        again = prompt_logprobs_of(runner, prompt + output)
        assert again.ranks[len(prompt) - 1 :] == [1] * len(output)


def test_a_token_takes_a_quarter_of_a_float32_ones_memory(runner: ModelRunner) -> None:
    assert runner.capacity.kv_bytes_per_token == 2 * 30 * 3 * 64
