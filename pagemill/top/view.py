"""Frames as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagemill.top.deployment import Away, Frame
from pagemill.top.figures import RouterFigures, SchedulerFigures, WorkerFigures

_NOTHING = "-"
_NEARLY_FULL = 0.9
_MAX_ADDRESS_WIDTH = 36


def render(frame: Frame) -> RenderableType:
    """One table per kind of process that answered, then what is away."""
    parts: list[RenderableType] = [_headline(frame)]
    if frame.routers:
        parts.append(_routers(frame.routers))
    if frame.schedulers:
        parts.append(_schedulers(frame.schedulers))
    if frame.workers:
        parts.append(_workers(frame.workers))
    parts += [_away(away) for away in frame.away]
    return Group(*parts)


def _headline(frame: Frame) -> Text:
    if frame.is_empty:
        over = "nothing answers"
    elif frame.interval_s is None:
        over = "first look, no rates yet"
    else:
        over = f"rates over {frame.interval_s:.1f} s"
    return Text(f"pagemill top  {frame.time[11:19]} UTC  {over}", style="bold")


def _table(title: str, addresses: Sequence[str], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, header_style="dim")
    width = max(len(_short(address)) for address in addresses)
    table.add_column(title, overflow="fold", min_width=min(width, _MAX_ADDRESS_WIDTH))
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _routers(rows: Sequence[RouterFigures]) -> Table:
    latencies = ["TTFT ms\np50/p99", "token ms\np50/p99"]
    cache = "cached\nanswers/tokens"
    table = _table("router", [row.address for row in rows], ["active", "req/s", "err/s", "tok/s", *latencies, cache])
    for row in rows:
        table.add_row(
            Text(_short(row.address)),
            str(row.requests_running),
            _number(row.requests_per_s),
            Text(_number(row.errors_per_s), style="red" if row.errors_per_s else ""),
            _number(row.output_tokens_per_s),
            f"{_ms(row.ttft_p50_s)}/{_ms(row.ttft_p99_s)}",
            f"{_ms(row.inter_token_p50_s)}/{_ms(row.inter_token_p99_s)}",
            f"{_percent(row.cached_answers_share)}/{_percent(row.cached_tokens_share)}",
        )
    return table


def _schedulers(rows: Sequence[SchedulerFigures]) -> Table:
    kv = ["KV\nuse", "KV\nblocks"]
    columns = ["workers", "running", "waiting", *kv, "prefix\nhits", "preempt\n/s", "steps\n/s"]
    table = _table("scheduler", [row.address for row in rows], columns)
    for row in rows:
        address = Text(_short(row.address))
        if not row.is_connected:
            address.append(f"\nno session from {_short(row.seen_by)}", style="red")
        elif row.seen_by:
            address.append(f"\nby {_short(row.seen_by)}", style="dim")
        table.add_row(
            address,
            Text(str(row.workers), style="" if row.workers else "red"),
            str(row.running),
            str(row.waiting),
            Text(_percent(row.kv_use), style="yellow" if (row.kv_use or 0) >= _NEARLY_FULL else ""),
            f"{row.kv_blocks_used}/{row.kv_blocks_total}",
            _percent(row.prefix_cache_hit_share),
            Text(_number(row.preemptions_per_s), style="yellow" if row.preemptions_per_s else ""),
            _number(row.steps_per_s),
        )
    return table


def _workers(rows: Sequence[WorkerFigures]) -> Table:
    columns = ["steps\n/s", "tok/s", "step\nms", "gap\nshare", "graph\nreplays", "KV\nblocks"]
    table = _table("worker", [row.address for row in rows], columns)
    for row in rows:
        table.add_row(
            Text(_short(row.address)),
            _number(row.steps_per_s),
            _number(row.tokens_per_s),
            _ms(None if row.step_ms is None else row.step_ms / 1000),
            _percent(row.gap_share),
            _percent(row.graph_replay_share),
            str(row.kv_blocks_total),
        )
    return table


def _away(away: Away) -> Text:
    return Text.assemble(away.address, "  ", (f"away: {away.reason}", "red"))


def _short(address: str) -> str:
    """Plain HTTP goes without saying."""
    return address.removeprefix("http://").rstrip("/")


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return _NOTHING if value is None else f"{100 * value:.0f}%"


def _ms(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{1000 * seconds:.{0 if seconds >= 0.01 else 1}f}"
