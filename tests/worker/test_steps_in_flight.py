"""Steps launched before the last result is taken, on devices with memory of their own: ids as one step at a time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled import assert_same, serve
from worker_harness import Driver, runner_for, save_checkpoint, tiny_model

from pagemill.errors import ConfigError
from pagemill.sampling_params import SamplingParams
from pagemill.step import SlotSampling
from worker.model_runner import ModelRunner
from worker.slots import DeviceStore, HostStore
from worker.step_device import CopyingDevice, HostMark, Mark

PLACES = [pytest.param("cpu", id="cpu")]
if torch.cuda.is_available():
    PLACES += [
        pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
        pytest.param("cuda-eager", id="cuda-eager", marks=pytest.mark.gpu),
    ]
GREEDY: dict[str, Any] = {"temperature": 0.0, "logprobs": 2}
KINDS: list[dict[str, Any]] = [
    {**GREEDY},
    {**GREEDY, "ignore_eos": True},
    {**GREEDY, "stop_token_ids": [11, 50, 90, 130, 170, 210, 250, 290]},
    {**GREEDY, "repetition_penalty": 1.7},
    {**GREEDY, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {**GREEDY, "logit_bias": {40: 3.0, 41: -100.0, 7: 2.0}},
    {**GREEDY, "min_tokens": 4, "stop_token_ids": list(range(3, 160))},
    {**GREEDY, "prompt_logprobs": 1},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.02, "seed": 2**62 + 5, "n": 2},
    {"temperature": 0.7, "frequency_penalty": 0.4, "seed": 9, "n": 3},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def native(checkpoint: Path) -> ModelRunner:
    """The CPU, which computes where the host writes."""
    return runner_for(checkpoint, block_size=8, max_num_batched_tokens=64)


def apart(checkpoint: Path, place: str, **overrides: Any) -> ModelRunner:
    """A runner on a device with memory of its own."""
    overrides = {"block_size": 8, "max_num_batched_tokens": 64, **overrides}
    if place == "cpu":
        return runner_for(checkpoint, step_device=CopyingDevice(torch.device("cpu")), **overrides)
    return runner_for(checkpoint, device="cuda", enforce_eager=place == "cuda-eager", **overrides)


@pytest.fixture(scope="module", params=PLACES)
def pipelined(request: pytest.FixtureRequest, checkpoint: Path) -> ModelRunner:
    runner = apart(checkpoint, request.param)
    assert runner.max_steps_in_flight == 2
    return runner


requests_strategy = st.lists(
    st.tuples(
        st.integers(1, 44),  # prompt tokens
        st.integers(4, 25),  # max_tokens
        st.integers(0, len(KINDS) - 1),
        st.one_of(st.none(), st.integers(1, 30)),  # aborted after so many results
        st.booleans(),  # begins as another prompt does
        st.one_of(st.none(), st.integers(1, 20)),  # comes after so many results, and goes first then
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=16, deadline=None, derandomize=True)
@given(drawn=requests_strategy, num_blocks=st.integers(10, 40), budget=st.integers(9, 64))
def test_two_steps_in_flight_change_no_token(
    native: ModelRunner, pipelined: ModelRunner, drawn: list[Any], num_blocks: int, budget: int
) -> None:
    random = np.random.default_rng(len(drawn))
    common = random.integers(3, 320, 44).tolist()
    requests, aborts, urgent = [], {}, {}
    for handle, (length, max_tokens, kind, abort_after, is_common, comes_after) in enumerate(drawn):
        prompt = common[:length] if is_common else random.integers(3, 320, length).tolist()
        requests.append((prompt, SamplingParams(max_tokens=max_tokens, **{"seed": handle, **KINDS[kind]})))
        if abort_after is not None:
            aborts[handle] = abort_after
        if comes_after is not None:
            urgent[handle] = comes_after
    expected = serve(native, requests, steps_in_flight=1)
    for runner in (native, pipelined):
        actual = serve(
            runner,
            requests,
            steps_in_flight=2,
            num_blocks=num_blocks,
            budget=budget,
            aborts=aborts,
            urgent=urgent,
        )
        assert_same(actual, expected, without=frozenset(aborts))


def test_preemption_is_among_what_is_compared(native: ModelRunner, pipelined: ModelRunner) -> None:
    # Who may stop by a token is not expected to get long, and enters where others would have to wait.
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=[1], **GREEDY)
    requests = [([5 + i] * 30, params) for i in range(6)]
    expected = serve(native, requests, steps_in_flight=1)
    actual = serve(pipelined, requests, steps_in_flight=2, num_blocks=24, urgent={4: 12, 5: 14})
    assert expected.preemptions == 0
    assert actual.preemptions > 0
    assert_same(actual, expected)


def test_histories_longer_than_the_staging_buffer_go_up_in_pieces(native: ModelRunner, checkpoint: Path) -> None:
    """All slots get prompts near the context length in one step, of which it computes a token each."""
    runner = apart(checkpoint, "cpu", max_num_batched_tokens=16)
    random = np.random.default_rng(3)
    prompts = [random.integers(3, 320, 250).tolist() for _ in range(8)]
    drivers = [Driver(native), Driver(runner)]
    outputs = []
    for driver in drivers:
        sequences = [driver.add(prompt) for prompt in prompts]
        plan, rows, _ = driver.plan(8)
        assert len(rows) == 1  # the driver fills one row after the other; here all are to enter at once
        for sequence in sequences[1:]:
            sequence.num_computed, sequence.entered = 1, True
            blocks = [driver.free_blocks.pop()]
            sequence.blocks += blocks
            plan.new_sequences.append(
                type(plan.new_sequences[0])(sequence.slot, sequence.token_ids, 250, 0, blocks, sequence.sampling)
            )
            plan.slots.append(sequence.slot)
            plan.num_tokens.append(1)
            plan.sample.append(False)
            plan.new_block_counts.append(0)
        assert len(plan.new_sequences) == 8
        driver.runner.execute(plan)
        outputs.append(driver.generate(4, 16))
    assert outputs[0] == outputs[1]


def test_a_failure_that_comes_back_late_fails_the_steps_in_flight_too(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM")
    with torch.no_grad():
        model.model.embed_tokens.weight[300] = float("nan")
    runner = apart(save_checkpoint(model, tmp_path), "cpu")
    driver = Driver(runner)
    good, bad = driver.add([5, 9, 13]), driver.add([4, 300, 5])
    steps = [runner.launch(driver.plan(64)[0]) for _ in range(2)]
    first, second = [step.result() for step in steps]
    assert [failure.slot for failure in first.failures] == [bad.slot]
    assert second.failures == []
    assert first.sampled_token_ids[1] == second.sampled_token_ids[1] == 0
    assert first.sampled_token_ids[0] != 0
    assert good.slot != bad.slot


def test_a_new_epoch_drops_steps_in_flight(checkpoint: Path) -> None:
    runner = apart(checkpoint, "cpu")
    expected = Driver(runner)
    expected.add([5, 9, 13])
    (ids,) = expected.generate(6)
    abandoned = Driver(runner, epoch=2)
    abandoned.add([7] * 40)
    for _ in range(2):
        runner.launch(abandoned.plan(64)[0])
    again = Driver(runner, epoch=3)
    again.add([5, 9, 13])
    assert again.generate(6) == [ids]


def test_a_new_epoch_begins_when_steps_in_flight_have_left_the_host_buffers(checkpoint: Path) -> None:
    reached: list[int] = []

    class CountedMark(HostMark):
        def wait(self) -> None:
            reached.append(self.reached_ns)

    class Marked(CopyingDevice):
        def mark(self) -> Mark:
            return CountedMark()

    runner = runner_for(checkpoint, step_device=Marked(torch.device("cpu")), block_size=8)
    driver = Driver(runner)
    driver.add([7] * 40)
    steps = [runner.launch(driver.plan(64)[0]) for _ in range(2)]
    assert steps[1].marks is not None and isinstance(steps[1].marks.end, HostMark)
    runner.begin_epoch(2)
    assert steps[1].marks.end.reached_ns in reached


@pytest.mark.parametrize("store", [HostStore, partial(DeviceStore, CopyingDevice(torch.device("cpu")))])
def test_more_history_than_kernels_address_is_refused(store: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs 4096 .* max_model_len 524288") as caught:
        store(4096, 1 << 19, 1)
    assert caught.value.field == "max_num_seqs"


def test_decode_steps_are_told_from_others(pipelined: ModelRunner) -> None:
    requests = [([5, 9, 13], SamplingParams(max_tokens=6, ignore_eos=True, **GREEDY))] * 2
    results = serve(pipelined, requests, steps_in_flight=2).results
    assert [result.is_decode for result in results[:2]] == [False, True]
    assert all(result.forward_ns > 0 for result in results)
    assert all(result.gap_ns >= 0 for result in results)
    is_recorded = pipelined.num_graphs > 0
    assert all(result.is_replay == (result.is_decode and is_recorded) for result in results)


OUT_OF_MEMORY = """
    import resource
    from pagemill.step import SlotSampling
    from worker_harness import Driver, runner_for

    def used_bytes():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    runner = runner_for("", num_blocks=64, num_threads=1)
    driver = Driver(runner)
    other = driver.add([504, 3575, 282])
    driver.run_step()
    # Alternatives for 128 rows of prompt take 2 x 25 MB, which is more than is left; a step without them takes none.
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes() + (20 << 20), resource.RLIM_INFINITY))
    driver.remove(other)
    greedy = driver.add(list(range(3, 203)), SlotSampling(temperature=0.0, num_prompt_logprobs=49152))
    plan, rows, sampled = driver.plan(512)
    result = runner.execute(plan)
    assert result.ran_out_of_memory, result
    assert [failure.slot for failure in result.failures] == [greedy.slot], result.failures
    assert "out of memory" in result.failures[0].message
    assert result.sampled_token_ids == [0]
    driver.remove(greedy)
    alone = driver.add([504, 3575, 282, 4649, 314])
    ids, = driver.generate(4)
    assert not driver.failures
    assert 7042 in ids, ids
    print("went on")
"""


def test_memory_that_runs_out_ends_the_rows_of_one_step() -> None:
    """A real limit on the address space of a process, and a request that needs more."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OUT_OF_MEMORY)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "went on\n", done.stderr[-3000:]


def test_a_slot_that_failed_is_clean_for_its_next_sequence(checkpoint: Path) -> None:
    """A step that runs out of memory after its rows were staged leaves the lengths that the next plan counts on."""

    class Exhausted(CopyingDevice):
        is_exhausted = False

        def download(self, tensor: torch.Tensor) -> torch.Tensor:
            if self.is_exhausted:
                raise torch.OutOfMemoryError("out of memory")
            return super().download(tensor)

    device = Exhausted(torch.device("cpu"))
    runner = runner_for(checkpoint, step_device=device, block_size=8)
    driver = Driver(runner)
    plain = driver.add([5, 9, 13])
    (expected,) = driver.generate(6)
    failing = driver.add([5, 9, 13], SlotSampling(temperature=0.0, num_logprobs=1))
    beside = driver.add([8, 7])
    device.is_exhausted = True
    steps = [runner.launch(driver.plan(64)[0])]
    device.is_exhausted = False
    steps.append(runner.launch(driver.plan(64)[0]))  # planned before the failure was known
    first, second = [step.result() for step in steps]
    assert {failure.slot for failure in first.failures} == {failing.slot, beside.slot}
    assert (first.sampled_token_ids, second.sampled_token_ids, second.failures) == ([0, 0], [0, 0], [])
    for sequence in (failing, beside):
        driver.remove(sequence)
    heir = driver.add([5, 9, 13])
    driver.free_slots.append(heir.slot)
    heir.slot = failing.slot
    assert driver.generate(6) == [expected]
    assert plain.outputs == expected
