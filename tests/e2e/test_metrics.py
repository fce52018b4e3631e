"""What real processes export: the names of the documentation, and the numbers that clients measured."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
from processes import Server, serve, wait_until
from prometheus_client.parser import text_string_to_metric_families

from pagemill.client import AsyncClient
from pagemill.sampling_params import SamplingParams
from pagemill.vllm_names import ROUTER_ALIASES, SCHEDULER_ALIASES

pytestmark = pytest.mark.e2e

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
PROCESSES = ("router", "scheduler", "worker")
MAX_NUM_SEQS = 2
OUTPUT_TOKENS = 24


@dataclass(frozen=True)
class Row:
    """A row of the documentation's table."""

    kind: str
    labels: frozenset[str]
    aliases: tuple[str, ...]


def documented() -> dict[tuple[str, str], Row]:
    """By process and name."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `pagemill:"):
            continue
        name, kind, labels, process, aliases, _ = (cell.strip() for cell in line.strip("|").split("|"))
        key = (process, name.strip("`"))
        assert key not in rows, f"{key} has two rows"
        rows[key] = Row(kind, frozenset(re.findall(r"`(.+?)`", labels)), tuple(re.findall(r"`(.+?)`", aliases)))
    return rows


@dataclass
class Exported:
    """One family as a process shows it."""

    kind: str
    series: list[dict[str, str]] = field(default_factory=list)  # labels of each sample
    values: dict[str, float] = field(default_factory=dict)  # by name of the sample, summed over labels

    @property
    def labels(self) -> set[frozenset[str]]:
        return {frozenset(labels) - {"le"} for labels in self.series}


def scrape(server: Server, process: str) -> dict[str, Exported]:
    """All families of a process, counters with their `_total`; times of creation are left out."""
    url = f"http://127.0.0.1:{server.process.ready['metrics_ports'][process]}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    families: dict[str, Exported] = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in families, f"{process} exports {name} twice"
        families[name] = exported = Exported(family.type)
        for sample in family.samples:
            exported.series.append(sample.labels)
            exported.values[sample.name] = exported.values.get(sample.name, 0.0) + sample.value
    return families


def value(server: Server, process: str, name: str, **labels: str) -> float:
    """A sample's value, summed over the labels that are not given."""
    url = f"http://127.0.0.1:{server.process.ready['metrics_ports'][process]}/metrics"
    with urllib.request.urlopen(url, timeout=10) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    found = [s for family in families for s in family.samples if s.name == name]
    return sum(s.value for s in found if labels.items() <= s.labels.items())


@dataclass
class Stream:
    """What a client saw of one answer, in seconds and tokens."""

    first_token_s: float
    last_token_s: float
    end_s: float
    num_tokens: int
    num_in_first: int


def stream(client: openai.OpenAI, model: str, prompt: str) -> Stream:
    """Read an answer of OUTPUT_TOKENS tokens to its end."""
    started = time.monotonic()
    times: list[float] = []
    counts: list[int] = []
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=OUTPUT_TOKENS,
        temperature=0,
        logprobs=True,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        logprobs = chunk.choices[0].logprobs if chunk.choices else None
        if logprobs is not None and logprobs.content:
            times.append(time.monotonic() - started)
            counts.append(len(logprobs.content))
    return Stream(times[0], times[-1], time.monotonic() - started, sum(counts), counts[0])


def is_near(measured: float, expected: float) -> bool:
    return abs(measured - expected) <= 0.1 * expected


def long_prompt(number: int) -> str:
    """Some hundred tokens that share no prefix with another number's, so that the first token takes its time."""
    return f"{number}: " + " ".join(f"{number * 7 + i} apples" for i in range(80))


@pytest.fixture(scope="module")
def deployment() -> Iterator[Server]:
    with serve("--metrics-vllm-names", "--redis", "off", "--max-num-seqs", str(MAX_NUM_SEQS)) as running:
        yield running


@pytest.fixture(scope="module")
def chat(deployment: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=deployment.http_url + "/v1", api_key="EMPTY", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def name(chat: openai.OpenAI) -> str:
    return chat.models.list().data[0].id


def test_OP01_histograms_hold_what_clients_measured(deployment: Server, chat: openai.OpenAI, name: str) -> None:
    stream(chat, name, "A first request, which warms everything up.")
    sides = ("pagemill", "vllm")
    histograms = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    names = [f"{side}:{histogram}_{part}" for side in sides for histogram in histograms for part in ("count", "sum")]
    before = {n: value(deployment, "router", n) for n in names}
    inner = ["time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"]
    inner_before = {n: value(deployment, "scheduler", f"pagemill:{n}_sum") for n in inner}
    num_intervals = value(deployment, "scheduler", "pagemill:inter_token_latency_seconds_count")

    with ThreadPoolExecutor(2 * MAX_NUM_SEQS) as pool:
        streams = list(pool.map(lambda number: stream(chat, name, long_prompt(number)), range(10)))
    deployment.wait_until_idle()

    after = {n: value(deployment, "router", n) - before[n] for n in names}
    for side in sides:
        count = {h: after[f"{side}:{h}_count"] for h in histograms}
        total = {h: after[f"{side}:{h}_sum"] for h in histograms}
        assert count == {
            "time_to_first_token_seconds": len(streams),
            "inter_token_latency_seconds": sum(s.num_tokens - s.num_in_first for s in streams),
            "e2e_request_latency_seconds": len(streams),
        }
        assert is_near(total["time_to_first_token_seconds"], sum(s.first_token_s for s in streams))
        assert is_near(total["e2e_request_latency_seconds"], sum(s.end_s for s in streams))
        assert is_near(total["inter_token_latency_seconds"], sum(s.last_token_s - s.first_token_s for s in streams))
    inner_after = {n: value(deployment, "scheduler", f"pagemill:{n}_sum") - inner_before[n] for n in inner}
    first_token, queue, prefill = inner_after.values()
    assert 0 < queue < first_token
    assert queue + prefill == pytest.approx(first_token)
    assert is_near(first_token, sum(s.first_token_s for s in streams))
    num_intervals = value(deployment, "scheduler", "pagemill:inter_token_latency_seconds_count") - num_intervals
    assert num_intervals == len(streams) * (OUTPUT_TOKENS - 1)


def test_OP01_every_end_is_counted_by_its_reason(deployment: Server, chat: openai.OpenAI, name: str) -> None:
    def counts() -> dict[str, float]:
        finished = "pagemill:request_success_total"
        reasons = {r: value(deployment, "router", finished, finished_reason=r) for r in ("stop", "length", "abort")}
        codes = ("OK", "CANCELLED", "INVALID_ARGUMENT")
        return reasons | {c: value(deployment, "router", "pagemill:requests_total", code=c) for c in codes}

    def ask(**options: object) -> openai.types.Completion:
        return chat.completions.create(**{"model": name, "prompt": "Once upon a time", "temperature": 0} | options)

    before = counts()
    tokens = value(deployment, "router", "pagemill:generation_tokens_total")
    answers = [ask(max_tokens=5, n=2, seed=1, temperature=1.0, extra_body={"ignore_eos": True})]
    answers.append(ask(max_tokens=40, stop=[","]))
    assert [c.finish_reason for a in answers for c in a.choices] == ["length", "length", "stop"]
    delivered = sum(a.usage.completion_tokens for a in answers if a.usage)
    assert value(deployment, "router", "pagemill:generation_tokens_total") - tokens == delivered
    for _ in range(3):
        cut = ask(max_tokens=2000, stream=True, extra_body={"ignore_eos": True})
        next(iter(cut))
        cut.close()
    for _ in range(2):
        with pytest.raises(openai.BadRequestError):
            ask(max_tokens=10**6)
    deployment.wait_until_idle()
    expected = {"stop": 1, "length": 2, "abort": 3, "OK": 2, "CANCELLED": 3, "INVALID_ARGUMENT": 2}
    wait_until(lambda: {k: v - before[k] for k, v in counts().items()} == expected, 10, f"{expected} on {before}")
    assert value(deployment, "router", "pagemill:requests_inflight") == 0


def test_running_and_waiting_are_the_known_numbers(deployment: Server) -> None:
    def gauges() -> tuple[float, float]:
        found = scrape(deployment, "scheduler")
        running, waiting = (found[f"vllm:num_requests_{state}"] for state in ("running", "waiting"))
        return sum(running.values.values()), sum(waiting.values.values())

    async def run() -> float:
        async with AsyncClient(deployment.grpc_address) as client:
            params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
            calls = [client.generate(f"{number} sheep", params) for number in range(MAX_NUM_SEQS + 3)]
            tasks = [asyncio.create_task(call) for call in calls]
            full = (MAX_NUM_SEQS, 3)
            await asyncio.to_thread(wait_until, lambda: gauges() == full, 20, f"{full} running and waiting")
            usage = scrape(deployment, "scheduler")["vllm:kv_cache_usage_perc"]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return sum(usage.values.values())

    assert 0 < asyncio.run(run()) < 1
    wait_until(lambda: gauges() == (0, 0), 20, "nothing running and waiting")


def test_documentation_and_processes_agree(deployment: Server, chat: openai.OpenAI, name: str) -> None:
    chat.completions.create(model=name, prompt="Hello", max_tokens=2)
    rows = documented()
    for process in PROCESSES:
        shown = scrape(deployment, process)
        expected = {metric: row for (of, metric), row in rows.items() if of == process}
        assert {n for n in shown if n.startswith("pagemill:")} == set(expected)
        aliases = {alias: row for row in expected.values() for alias in row.aliases}
        assert {n for n in shown if not n.startswith("pagemill:")} == set(aliases)
        for metric, row in expected.items():
            assert shown[metric].kind == row.kind, metric
            # Of counters by a code there may be none yet.
            assert shown[metric].labels <= {row.labels}, metric
            for alias in row.aliases:
                assert shown[alias].kind == row.kind, alias
                assert shown[alias].labels == {row.labels | {"model_name"}}, alias
                assert [*shown[alias].values.values()] == [*shown[metric].values.values()], alias


def test_each_vllm_name_is_exported_by_one_kind_of_process() -> None:
    names = [alias for table in (ROUTER_ALIASES, SCHEDULER_ALIASES) for aliases in table.values() for alias in aliases]
    assert len(names) == len(set(names))


def test_failed_requests_are_errors_and_vllm_names_are_off_by_default() -> None:
    with serve("--redis", "off", "--request-timeout-s", "2") as server:
        client = openai.OpenAI(base_url=server.http_url + "/v1", api_key="EMPTY", max_retries=0, timeout=60)
        model = client.models.list().data[0].id
        with pytest.raises(openai.APIStatusError) as refusal:
            client.completions.create(model=model, prompt="Count:", max_tokens=4000, extra_body={"ignore_eos": True})
        assert refusal.value.status_code == 504
        server.wait_until_idle()
        assert value(server, "router", "pagemill:request_success_total", finished_reason="error") == 1
        assert value(server, "router", "pagemill:requests_total", code="DEADLINE_EXCEEDED") == 1
        shown = {name for process in PROCESSES for name in scrape(server, process)}
        assert shown == {metric for process, metric in documented() if process in PROCESSES}
