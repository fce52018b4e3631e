"""Percentiles, goodput and rows, against numpy and against what was put in."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from pagemill.bench import report
from pagemill.bench.load import LoadResult
from pagemill.bench.percentiles import Distribution, percentile
from pagemill.bench.records import WRONG_LENGTH, Answer
from pagemill.bench.serving import LoadSamples, Objective, load_columns
from pagemill.errors import ConfigError, PagemillError


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_percentiles_are_numpys(count: int) -> None:
    samples = np.random.default_rng(count).gamma(2.0, 3.0, count)
    for share in (0.0, 0.01, 0.5, 0.9, 0.99, 1.0):
        assert percentile(sorted(samples.tolist()), share) == pytest.approx(np.percentile(samples, share * 100))
    made = Distribution.of(samples.tolist())
    expected = [samples.mean(), *np.percentile(samples, [50, 90, 99]), samples.max()]
    assert [made.mean, made.p50, made.p90, made.p99, made.highest] == pytest.approx(expected)
    assert made.count == count


def test_a_distribution_of_nothing_is_not_a_number() -> None:
    columns = Distribution.of([]).columns("ttft_ms", 1e3)
    assert list(columns) == ["ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99", "ttft_ms_max"]
    assert all(math.isnan(value) for value in columns.values())


def answer(first_s: float, gaps_s: list[float], *, start_s: float = 0.0, cached: int = 0) -> Answer:
    arrivals = array(
        "d", [start_s + first_s, *(start_s + first_s + sum(gaps_s[: at + 1]) for at in range(len(gaps_s)))]
    )
    count = len(arrivals)
    return Answer(10, count, start_s, arrivals, arrivals[-1], num_output_tokens=count, num_cached_tokens=cached)


def test_the_figures_of_a_load_are_those_of_its_answers() -> None:
    answers = [answer(0.1, [0.02, 0.04]), answer(0.3, [0.02, 0.02], start_s=1.0, cached=5)]
    failed = Answer(10, 3, 0.5, end_s=0.6)
    failed.fail("http_429", "the queue is full")
    result = LoadResult([*answers, failed], 2.0, 0.25)
    columns = load_columns(result, LoadSamples.of(result.answers), Objective(first_token_s=0.2, per_token_s=0.03))
    assert columns["num_requests"] == 3
    assert columns["num_failed"] == 1
    assert columns["failures"] == "http_429=1"
    assert columns["requests_per_second"] == 1.0
    assert columns["output_tokens_per_second"] == 3.0
    assert columns["cached_share"] == 0.25
    assert columns["ttft_ms_p50"] == pytest.approx(200)
    assert columns["itl_ms_p50"] == pytest.approx(20)
    assert columns["itl_ms_max"] == pytest.approx(40)
    assert columns["tpot_ms_max"] == pytest.approx(30)
    assert columns["e2e_ms_max"] == pytest.approx(340)
    assert columns["goodput_requests_per_second"] == 0.5
    assert columns["goodput_share"] == pytest.approx(1 / 3)


def test_goodput_is_the_share_that_keeps_to_both_limits() -> None:
    generator = np.random.default_rng(0)
    first, per_token = generator.gamma(2, 0.05, 500), generator.gamma(2, 0.01, 500)
    answers = [answer(float(f), [float(t), float(t)]) for f, t in zip(first, per_token, strict=True)]
    result = LoadResult(answers, 10.0, 0.0)
    for limits in ((0.1, None), (None, 0.02), (0.1, 0.02)):
        good = (first <= (limits[0] or np.inf)) & (per_token <= (limits[1] or np.inf))
        columns = load_columns(result, LoadSamples.of(answers), Objective(*limits))
        assert columns["goodput_share"] == pytest.approx(good.mean())
        assert columns["goodput_requests_per_second"] == pytest.approx(good.sum() / 10)
    assert "goodput_share" not in load_columns(result, LoadSamples.of(answers), Objective())


def test_an_answer_of_one_token_has_no_time_per_token_and_can_be_good() -> None:
    one = answer(0.1, [])
    assert one.per_token_s is None
    assert Objective(per_token_s=0.001).is_met(one)
    assert not Objective(first_token_s=0.05).is_met(one)


def test_an_answer_of_another_length_fails_the_run() -> None:
    short = answer(0.1, [0.1])
    short.num_asked_tokens = 3
    short.check_length()
    assert short.error == WRONG_LENGTH
    result = LoadResult([short, answer(0.1, [])], 1.0, 0.0)
    with pytest.raises(PagemillError, match="1 of 2 answers: an answer has 2 tokens, 3 were asked for"):
        result.require_lengths()
    with pytest.raises(PagemillError, match=r"1 of 2 requests failed \(wrong_length\)"):
        result.require_all()
    assert not Objective().is_met(short)


ROW = {"backend": "http", "elapsed_s": 1 / 3, "ttft_ms_p99": math.nan, "num_prompts": 4}


def test_rows_go_to_csv_and_json_as_they_come(tmp_path: Path) -> None:
    csv_path, json_path = tmp_path / "rows.csv", tmp_path / "rows.jsonl"
    about = report.context("m", "dtype=float32", "first")
    for _ in range(2):
        report.RowFiles(csv_path, json_path, report.THROUGHPUT_COLUMNS).write(ROW | about)
    with csv_path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2
    assert list(lines[0]) == list(report.THROUGHPUT_COLUMNS)
    assert lines[0]["elapsed_s"] == "0.333333"
    assert lines[0]["ttft_ms_p99"] == lines[0]["requests_per_second"] == ""
    (first, second) = [json.loads(line) for line in json_path.read_text().splitlines()]
    assert first == second
    assert first.keys() == {
        "backend", "elapsed_s", "num_prompts", "label", "model", "options", "version", "date", "command",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "s3cret", "--seed", "1"], ["--api-key", "KEY", "--seed", "1"]),
        (["--api-key=s3cret", "model"], ["--api-key=KEY", "model"]),
        (["--serve-args", "--api-key 's3cret, other' --port 1"], ["--serve-args", "--api-key KEY --port 1"]),
        (["--serve-args=--api-key=s3cret"], ["--serve-args=--api-key=KEY"]),
        (["--label", "a=b", "--seed=3"], ["--label", "a=b", "--seed=3"]),
    ],
)
def test_rows_keep_the_command_without_api_keys(
    words: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagemill", *words])
    command = report.context("m", "", "")["command"]
    assert isinstance(command, str)
    assert shlex.split(command) == ["pagemill", *shown]


def test_a_file_of_other_columns_and_a_missing_folder_are_refused_before_anything_runs(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="other columns"):
        report.RowFiles(other, None, report.SERVE_COLUMNS)
    with pytest.raises(ConfigError, match="there is no folder"):
        report.RowFiles(None, tmp_path / "no" / "rows.json", report.SERVE_COLUMNS)


def test_every_figure_of_a_load_has_its_column() -> None:
    result = LoadResult([answer(0.1, [0.1])], 1.0, 0.0)
    columns = load_columns(result, LoadSamples.of(result.answers), Objective(0.1, 0.1))
    assert columns.keys() <= set(report.SERVE_COLUMNS)
    assert len(set(report.SERVE_COLUMNS)) == len(report.SERVE_COLUMNS)


def test_the_table_shows_only_columns_that_have_something() -> None:
    made = report.table([ROW], {"backend": "backend", "ttft_ms_p99": "p99", "ms_per_step": "step", "num_prompts": "n"})
    assert [column.header for column in made.columns] == ["backend", "n"]
