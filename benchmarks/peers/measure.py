"""What one run of one workload on one engine is: its record, how it is driven over HTTP, and the table of medians."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlparse

from workloads import CONCURRENT, Request


@dataclass
class RequestTimes:
    """When one request's pieces arrived, in seconds of time.perf_counter()."""

    start: float
    tokens: list[float]
    num_output_tokens: int
    num_cached_tokens: int = 0


@dataclass
class Record:
    """One run. Times in the units that the names say; `cpu_s` is 0 where the engine's process is not known."""

    engine: str
    workload: str
    repeat: int
    wall_s: float
    cpu_s: float
    output_tokens: int
    input_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    ttft_ms_p50: float | None
    itl_ms_p50: float | None
    itl_ms_p99: float | None


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def make_record(
    engine: str,
    workload: str,
    repeat: int,
    requests: list[Request],
    times: list[RequestTimes],
    wall_s: float,
    cpu_s: float,
) -> Record:
    """Sums up one run. Engines that report no times per token give RequestTimes without tokens."""
    ttft = [1e3 * (t.tokens[0] - t.start) for t in times if t.tokens]
    gaps = [1e3 * (b - a) for t in times for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
    output_tokens = sum(t.num_output_tokens for t in times)
    return Record(
        engine=engine,
        workload=workload,
        repeat=repeat,
        wall_s=round(wall_s, 3),
        cpu_s=round(cpu_s, 2),
        output_tokens=output_tokens,
        input_tokens=sum(len(r.prompt) for r in requests),
        cached_tokens=sum(t.num_cached_tokens for t in times),
        output_tokens_per_s=round(output_tokens / wall_s, 1),
        ttft_ms_p50=round(statistics.median(ttft), 1) if ttft else None,
        itl_ms_p50=round(statistics.median(gaps), 2) if gaps else None,
        itl_ms_p99=round(percentile(gaps, 0.99), 2) if gaps else None,
    )


def append_record(path: Path, record: Record) -> None:
    print(json.dumps(asdict(record)), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


async def drive_request(url: str, model: str, request: Request) -> RequestTimes:
    """One streaming completion over a bare socket, so that the client costs as little as it can."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.num_output_tokens,
        "min_tokens": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    payload = json.dumps(body).encode()
    host = urlparse(url)
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host.hostname, host.port, limit=1 << 22)
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)
    await writer.drain()
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode() + (await reader.read(2000)).decode(errors="replace"))
    arrivals: list[float] = []
    usage: dict = {}
    while line := await reader.readline():
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        now = time.perf_counter()
        if b'"usage":{' in line or b'"usage": {' in line:
            chunk = json.loads(line[6:])
            usage = chunk["usage"]
            if not chunk["choices"]:
                continue
        arrivals.append(now)
    writer.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return RequestTimes(start, arrivals, usage.get("completion_tokens", request.num_output_tokens), cached)


async def drive_workload(url: str, model: str, name: str, requests: list[Request]) -> tuple[float, list[RequestTimes]]:
    """All requests of a workload, at once or in turn as the workload says. Returns (wall seconds, times)."""
    start = time.perf_counter()
    if CONCURRENT[name]:
        times = list(await asyncio.gather(*(drive_request(url, model, r) for r in requests)))
    else:
        times = [await drive_request(url, model, r) for r in requests]
    return time.perf_counter() - start, times


def tree_cpu_s(root_pid: int) -> float:
    """CPU seconds of a live process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(entry))
        ticks[int(entry)] = int(fields[11]) + int(fields[12])
    total, todo = 0, [root_pid]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def table(path: Path) -> str:
    """Medians over the repeats in a file of records, as Markdown."""
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        groups[row["workload"], row["engine"]].append(row)

    def median(rows: list[dict], key: str, digits: int) -> str:
        values = [r[key] for r in rows if r[key] is not None]
        return f"{statistics.median(values):.{digits}f}" if values else "–"

    lines = [
        "| workload | engine | runs | output tok/s | ms a token p50 | p99 | TTFT ms p50 | CPU s | cached tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (workload, engine), rows in sorted(groups.items()):
        cells = [
            workload,
            engine,
            str(len(rows)),
            median(rows, "output_tokens_per_s", 0),
            median(rows, "itl_ms_p50", 2),
            median(rows, "itl_ms_p99", 2),
            median(rows, "ttft_ms_p50", 0),
            median(rows, "cpu_s", 1),
            median(rows, "cached_tokens", 0),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
