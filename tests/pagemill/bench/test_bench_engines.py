"""Cases, what is made of an engine's times, processes of their own, and model directories without weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagemill.bench.engines import FreshWorkloads, check_lengths
from pagemill.bench.isolated import isolated
from pagemill.bench.machine import processor_name
from pagemill.bench.model_files import SHAPES, shape_config, write_model, write_tokenizer
from pagemill.bench.throughput import Case, measure
from pagemill.bench.workloads import FixedLengths
from pagemill.commands.bench_throughput import make_cases, peer_cases
from pagemill.errors import ConfigError, PagemillError
from pagemill.model_source import resolve_model
from router.tokenizer import load_tokenizer


def test_without_sizes_all_prompts_are_given_at_once() -> None:
    assert make_cases(512, 256, None, None, ()) == [Case(512, 256, 1000, 1000, with_steps=False)]
    assert make_cases(512, 256, 30, None, ()) == [Case(512, 256, 30, 30, with_steps=False)]


def test_each_size_is_a_row_of_one_batch_or_of_all_prompts() -> None:
    assert make_cases(8, 4, None, "1 16,all", ()) == [
        Case(8, 4, 1, 1, with_steps=True),
        Case(8, 4, 16, 16, with_steps=True),
        Case(8, 4, 1000, 1000, with_steps=False),
    ]
    assert make_cases(8, 4, 40, "1,16,64", ()) == [
        Case(8, 4, 40, 1, with_steps=True),
        Case(8, 4, 40, 16, with_steps=True),
        Case(8, 4, 40, 40, with_steps=True),
    ]


def test_cases_have_lengths_of_their_own() -> None:
    assert make_cases(8, 4, None, None, ("128/128@1", "512/1@64", "5/6@all", "5/6@2x8")) == [
        Case(128, 128, 1, 1, with_steps=True),
        Case(512, 1, 64, 64, with_steps=False),
        Case(5, 6, 1000, 1000, with_steps=False),
        Case(5, 6, 8, 2, with_steps=True),
    ]


@pytest.mark.parametrize("text", ["", "x", "1/2", "1/2@", "0/2@1", "1/0@1", "1/2@0", "1/2@1x0", "1/2@some", "-1/2@1"])
def test_a_case_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no IN/OUT@SIZE"):
        make_cases(8, 4, None, None, (text,))
    with pytest.raises(ConfigError, match="batch-sizes is empty"):
        make_cases(8, 4, None, " ", ())


def test_a_peer_gets_the_same_lengths_with_fewer_prompts() -> None:
    cases = make_cases(8, 4, None, "1,16,64,all", ())
    assert peer_cases(cases, 32, 16) == [
        Case(8, 4, 1, 1, with_steps=True),
        Case(8, 4, 16, 16, with_steps=True),
        Case(8, 4, 32, 16, with_steps=False),
        Case(8, 4, 32, 16, with_steps=False),
    ]


@dataclass
class TimedEngine:
    """Takes 100 ms for the first token of a batch and 10 ms for each step after it."""

    backend: str = "fake"
    model: str = ""
    device: str = "none"
    asked: list[tuple[int, int, int]] = field(default_factory=list)

    def generate(self, workload: FixedLengths, count: int, at_once: int) -> Sequence[float]:
        self.asked.append((workload.output_len, count, at_once))
        num_batches = -(-count // at_once)
        return [num_batches * (0.1 + 0.01 * (workload.output_len - 1))]

    def close(self) -> None:
        pass


def test_rates_and_steps_come_from_the_times_of_an_engine() -> None:
    engine = TimedEngine()
    (made,) = measure(engine, [Case(20, 11, 8, 4, with_steps=True)], FreshWorkloads(100, 0), 2)
    columns = made.columns()
    assert columns["elapsed_s"] == pytest.approx(0.4)
    assert columns["requests_per_second"] == pytest.approx(8 / 0.4)
    assert columns["output_tokens_per_second"] == pytest.approx(88 / 0.4)
    assert columns["total_tokens_per_second"] == pytest.approx(8 * 31 / 0.4)
    assert columns["first_token_ms"] == pytest.approx(100)
    assert columns["ms_per_step"] == pytest.approx(10)
    assert columns["prefill_tokens_per_second"] == pytest.approx(4 * 20 / 0.1)
    # Two to warm up, three of one token, and per repeat all prompts and a batch.
    assert engine.asked[2:] == [(1, 4, 4)] * 3 + [(11, 8, 4), (11, 4, 4)] * 2


def test_one_batch_is_not_run_twice_for_its_step() -> None:
    engine = TimedEngine()
    (made,) = measure(engine, [Case(20, 11, 4, 4, with_steps=True)], FreshWorkloads(100, 0), 1)
    assert engine.asked[2:] == [(1, 4, 4)] * 3 + [(11, 4, 4)]
    assert made.columns()["ms_per_step"] == pytest.approx(10)


def test_answers_of_another_length_or_number_are_refused() -> None:
    check_lengths([5, 5], 5, 2)
    with pytest.raises(PagemillError, match="1 of 2 answers have a wrong length, such as 4 tokens, not 5"):
        check_lengths([5, 4], 5, 2)
    with pytest.raises(PagemillError, match="1 answers came, 2 were asked for"):
        check_lengths([5], 5, 2)


def yield_pids(count: int) -> Iterator[int]:
    for _ in range(count):
        yield os.getpid()


def yield_then_fail(error: Exception | None) -> Iterator[str]:
    yield "first"
    if error is not None:
        raise error
    os._exit(3)


def test_an_isolated_generator_runs_elsewhere() -> None:
    pids = list(isolated(yield_pids, 3))
    assert len(pids) == 3
    assert len(set(pids)) == 1
    assert pids[0] != os.getpid()


@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (ConfigError("wrong", field="dtype"), ConfigError, "^wrong$"),
        (KeyError("x"), PagemillError, "KeyError: 'x'"),
        (None, PagemillError, "died with code 3"),
    ],
)
def test_errors_of_an_isolated_generator_are_those_of_its_caller(
    error: Exception | None, expected: type[Exception], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    items = isolated(yield_then_fail, error)
    assert next(items) == "first"
    with pytest.raises(expected, match=text) as raised:
        next(items)
    assert getattr(raised.value, "field", "") == ("dtype" if expected is ConfigError else "")


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_configurations_of_models(shape: str) -> None:
    config = shape_config(shape)
    assert config["hidden_size"] == config["head_dim"] * config["num_attention_heads"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert shape_config(shape, num_layers=3)["num_hidden_layers"] == 3


def test_an_unknown_shape_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no such shape; there are llama-3-8b"):
        shape_config("llama-9")


def test_a_written_model_has_a_tokenizer_of_its_vocabulary(tmp_path: Path) -> None:
    write_model(tmp_path / "m", "llama-2-7b", num_layers=1)
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "m")))
    assert tokenizer.vocab_size == 32000
    assert tokenizer.eos_token_ids == [2]
    assert all(tokenizer.token_bytes(token_id) for token_id in range(3, 32000))
    text = "the quick brown fox, 42 jumps über"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < len(text)


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocabulary of 200 is too small"):
        write_tokenizer(tmp_path / "tokenizer.json", 200)


def test_the_processor_is_named_as_the_kernel_names_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A CPU @ 3 GHz\n")
    assert processor_name(cpuinfo) == "A CPU @ 3 GHz"
    assert processor_name(tmp_path / "none")
