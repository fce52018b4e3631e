"""`pagemill bench` as a person meets it: help, and one line for what cannot be measured, before anything is started."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click
import pytest

from pagemill.bench.arrivals import ClosedLoop, OpenLoop
from pagemill.bench.load_plan import LoadPlan, LoadPoint
from pagemill.bench.plot import PlottedLoad, check_plot, write_plot
from pagemill.bench.serving import LoadSamples
from pagemill.bench.workloads import ChatLengths, FixedLengths, MultiTurn, SharedPrefixes, TokenSource
from pagemill.cli import app
from pagemill.commands.bench_command import join_lists
from pagemill.commands.bench_options import chosen_engine, engine_options, model_options
from pagemill.errors import ConfigError, ModelLoadError, PagemillError

PLAN = {
    "workload": "fixed", "input_len": 32, "output_len": 8, "length_sigma": 0.8, "prefix_len": None, "num_prefixes": 2,
    "turns": 3, "pause_s": 0.0, "request_rate": None, "burstiness": 1.0, "concurrency": None, "num_requests": None,
    "duration_s": None, "warm_up": 0, "timeout_s": 10.0, "slo_ttft_ms": None, "slo_tpot_ms": None, "seed": 0,
}  # fmt: skip
TOKENS = TokenSource(1000, 0)


def bench(*arguments: str) -> None:
    app.main(args=["bench", *arguments], prog_name="pagemill", standalone_mode=False)


@pytest.mark.parametrize("command", ["throughput", "latency", "serve", "kernels", "make-model"])
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench(command, "--help")
    text = capsys.readouterr().out
    assert f"Usage: pagemill bench {command}" in text
    assert f"pagemill bench {command} " in text.split("\n", 1)[1]


def test_options_of_the_engine_are_those_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    bench("throughput", "--help")
    engine = capsys.readouterr().out.split("Options of the engine")[1]
    for option in ("--dtype", "--max-num-seqs", "--enforce-eager", "--load-format", "--block-size", "--tokenizer"):
        assert f"  {option}" in engine
    assert "--seed" not in engine


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("throughput", "--backend", "http"), "--backend http needs --base-url URL, or --serve"),
        (("latency", "--backend", "grpc", "--base-url", "http://h:1"), "--backend grpc needs --address HOST:PORT"),
        (("serve", "--backend", "offline"), "--backend offline: bench serve asks a server"),
        (("serve",), "--backend http needs --base-url URL"),
        (("throughput", "--backend", "tcp"), "--backend tcp: must be of offline, http, grpc"),
        (("latency", "--serve", "--address", "h:1"), "give one of them"),
        (("throughput", "--serve-args", "--x"), "--serve-args goes to the server that --serve starts"),
        (("throughput", "--serve", "--serve-args", "'--x"), '--serve-args is "\'--x": No closing quotation'),
        (("throughput", "--shape", "tiny", "model"), "--shape tiny and the model 'model': give one of them"),
        (("throughput", "--shape", "tiny", "--batch-sizes", "1,x"), "is no IN/OUT@SIZE"),
        (("throughput", "--shape", "tiny", "--csv", "/nowhere/rows.csv"), "there is no folder /nowhere"),
        (("latency", "--metrics-file", "/nowhere/metrics.txt"), "there is no folder /nowhere"),
        (("serve", "--plot", "picture.jpg"), "must be a .png file"),
        (("serve", "--plot", "/nowhere/picture.png"), "there is no folder /nowhere"),
        (("serve", "--base-url", "h:1", "--request-rate", "1", "--concurrency", "1"), "give one of them"),
        (("throughput", "--shape", "tiny", "--block-size", "7", "--device", "cpu"), "--block-size"),
    ],
)
def test_what_contradicts_is_one_line_before_anything_starts(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bench(*arguments)
    assert text in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("arguments", [("serve", "--workload", "odd"), ("throughput", "--input-len", "0"), ("none",)])
def test_what_click_refuses_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError):
        bench(*arguments)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(PagemillError, match=r"127\.0\.0\.1:9 cannot be reached"):
        bench("serve", "--base-url", "http://127.0.0.1:9")


def test_lists_may_be_written_with_spaces() -> None:
    lists = frozenset({"--batch-sizes"})
    assert join_lists(["--batch-sizes", "1", "2", "all", "--csv", "f"], lists) == [
        "--batch-sizes",
        "1,2,all",
        "--csv",
        "f",
    ]
    assert join_lists(["--batch-sizes", "1,2,", "4", "model"], lists) == ["--batch-sizes", "1,2,4", "model"]
    assert join_lists(["--batch-sizes=1,2", "4"], lists) == ["--batch-sizes=1,2", "4"]
    assert join_lists(["--batch-sizes"], lists) == ["--batch-sizes"]


def parsed(*arguments: str) -> dict:
    command = click.Command("any", params=[*model_options(), *engine_options()])
    return command.make_context("any", list(arguments)).params


def test_settings_reach_the_offline_engine_and_a_server_alike() -> None:
    words = ("--dtype", "float32", "--max-num-seqs", "7", "--enforce-eager", "--no-enable-prefix-caching")
    with chosen_engine(parsed("--shape", "tiny", *words), is_run_here=True) as engine:
        args = engine.args()
        assert (args.dtype, args.max_num_seqs, args.enforce_eager) == ("float32", 7, True)
        assert (args.enable_prefix_caching, args.load_format) == (False, "dummy")
        assert Path(args.model, "config.json").is_file()
        arguments = engine.serve_arguments()
        assert arguments[arguments.index("--max-num-seqs") + 1] == "7"
        assert {"--enforce-eager", "--no-enable-prefix-caching"} <= set(arguments)
        assert arguments[arguments.index("--model") + 1] == args.model
        assert (
            engine.shown()
            == "dtype=float32 enable_prefix_caching=False enforce_eager=True load_format=dummy max_num_seqs=7"
        )
    assert not Path(args.model).exists(), "what was written for the run is gone"


def test_a_model_without_a_tokenizer_gets_one_of_its_size(tmp_path: Path) -> None:
    bench("make-model", "--shape", "tiny", "--out", str(tmp_path / "m"), "--layers", "1")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["num_hidden_layers"] == 1
    with chosen_engine(parsed(str(tmp_path / "m")), is_run_here=True) as engine:
        assert engine.args().tokenizer == ""
    (tmp_path / "m" / "tokenizer.json").unlink()
    with chosen_engine(parsed(str(tmp_path / "m")), is_run_here=True) as engine:
        tokenizer = json.loads(Path(engine.args().tokenizer).read_text())
        assert len(tokenizer["model"]["vocab"]) == engine.vocab_size == 1024
    with pytest.raises(ConfigError, match=r"holds a config\.json already"):
        bench("make-model", "--shape", "tiny", "--out", str(tmp_path / "m"))


def test_a_server_elsewhere_needs_no_model_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_DEMO_MODEL", "/nowhere/model.gguf")
    with chosen_engine(parsed(), is_run_here=False) as engine:
        assert engine.source is None
        assert engine.vocab_size is None
    with chosen_engine(parsed("--shape", "tiny"), is_run_here=False) as engine:
        assert engine.vocab_size == 1024
    with pytest.raises(ModelLoadError, match="PAGEMILL_DEMO_MODEL"), chosen_engine(parsed(), is_run_here=True):
        pass


def plan(**options: object) -> LoadPlan:
    made = LoadPlan(**(PLAN | options))
    made.check()
    return made


def test_a_plan_has_a_load_for_each_rate_or_concurrency() -> None:
    assert plan(request_rate="8,16 24.5").points == [LoadPoint(rate, None) for rate in (8.0, 16.0, 24.5)]
    assert plan(concurrency="1,64").points == [LoadPoint(None, 1), LoadPoint(None, 64)]
    assert plan().points == [LoadPoint(None, 16)]


def test_a_plan_ends_by_count_or_by_duration() -> None:
    assert plan().schedule(LoadPoint(None, 16), 0) == ClosedLoop(16, 200)
    assert plan(duration_s=5.0).schedule(LoadPoint(None, 2), 0) == ClosedLoop(2, None, 5.0)
    both = plan(duration_s=1e9, num_requests=30, request_rate="4").schedule(LoadPoint(4.0, None), 0)
    assert isinstance(both, OpenLoop)
    assert len(both.times_s) == 30


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fixed", FixedLengths), ("chat", ChatLengths), ("shared-prefix", SharedPrefixes), ("multi-turn", MultiTurn)],
)
def test_each_workload_has_a_name(name: str, kind: type) -> None:
    assert type(plan(workload=name).make_workload(TOKENS, 4096)) is kind


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"request_rate": "x"}, "must be rates"),
        ({"request_rate": "-1"}, "must be rates"),
        ({"request_rate": "nan"}, "must be rates"),
        ({"concurrency": "0"}, "must be numbers"),
        ({"concurrency": "1.5"}, "must be numbers"),
        ({"request_rate": "inf", "duration_s": 3.0}, "all at once"),
        ({"prefix_len": 33}, "--prefix-len 33 is over --input-len 32"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _ = plan(**options).points


def test_sequences_over_the_context_are_refused() -> None:
    plan().make_workload(TOKENS, 40)
    plan().make_workload(TOKENS, 0)
    with pytest.raises(ConfigError, match="sequences of 40 tokens do not fit the model's context of 39"):
        plan().make_workload(TOKENS, 39)


def test_a_plot_is_drawn_where_matplotlib_is_and_refused_with_the_command_where_not(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match=r"pip install 'pagemill\[plot\]'"):
            check_plot(picture)
        return
    check_plot(picture)
    names = [f"{name}_{key}" for name in ("ttft_ms", "tpot_ms", "e2e_ms") for key in ("p50", "p90", "p99")]
    samples = LoadSamples([0.1, 0.2], [0.01], [0.01, 0.02], [0.5, 0.7])
    loads = [PlottedLoad(f"{at}", at, samples, dict.fromkeys(names, at)) for at in (1.0, 2.0)]
    write_plot(picture, "title", "conversations at once", loads)
    assert picture.read_bytes().startswith(b"\x89PNG")
