"""The figures that are shown of each process, and where they come from. Nothing here depends on how they are shown.

Rates, shares and latencies are of the interval between two looks and None where it says nothing about them: at the
first look, or where nothing happened. Names that end in `_total` count since the process started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagemill.top.rates import Change, label_values, share

# How a request ended without anything being wrong with the server: it was served, or its client left.
_NOT_ERRORS = ("OK", "CANCELLED")


@dataclass(frozen=True, slots=True)
class RouterFigures:
    """One router. Latencies in seconds; `requests_by_code` has how those that ended did, by gRPC code name."""

    address: str
    requests_running: int
    requests_per_s: float | None
    errors_per_s: float | None
    output_tokens_per_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    cached_answers_share: float | None
    cached_tokens_share: float | None
    requests_total: int
    requests_by_code: Mapping[str, int]
    prompt_tokens_total: int
    output_tokens_total: int
    first_tokens_total: int


@dataclass(frozen=True, slots=True)
class SchedulerFigures:
    """One scheduler, as it tells itself or (`seen_by` is a router) as it told a router.

    Through a router, steps and prefix cache are not known.
    """

    address: str
    seen_by: str
    is_connected: bool
    workers: int
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_use: float | None
    prefix_cache_hit_share: float | None
    preemptions_per_s: float | None
    steps_per_s: float | None
    preemptions_total: int
    steps_total: int | None


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker. `gap_share` is the part of the time between first and last step for which the device waited."""

    address: str
    steps_per_s: float | None
    tokens_per_s: float | None
    step_ms: float | None
    gap_share: float | None
    graph_replay_share: float | None
    kv_blocks_total: int
    steps_total: int
    tokens_total: int


def router_figures(address: str, change: Change) -> RouterFigures:
    """Figures of a router from its own series."""
    by_code = {
        code: change.total("pagemill:requests_total", code=code)
        for code in label_values(change.current, "pagemill:requests_total", "code")
    }
    first_token = change.histogram("pagemill:time_to_first_token_seconds")
    between_tokens = change.histogram("pagemill:inter_token_latency_seconds")
    error_rates = [
        change.rate("pagemill:requests_total", code=code) or 0.0 for code in by_code if code not in _NOT_ERRORS
    ]
    return RouterFigures(
        address=address,
        requests_running=int(change.value("pagemill:requests_inflight") or 0),
        requests_per_s=change.rate("pagemill:requests_total"),
        errors_per_s=None if change.seconds is None else sum(error_rates),
        output_tokens_per_s=change.rate("pagemill:generation_tokens_total"),
        ttft_p50_s=first_token.quantile(0.5),
        ttft_p99_s=first_token.quantile(0.99),
        inter_token_p50_s=between_tokens.quantile(0.5),
        inter_token_p99_s=between_tokens.quantile(0.99),
        cached_answers_share=_hit_share(change, "response"),
        cached_tokens_share=_hit_share(change, "tokens"),
        requests_total=sum(by_code.values()),
        requests_by_code=by_code,
        prompt_tokens_total=change.total("pagemill:prompt_tokens_total"),
        output_tokens_total=change.total("pagemill:generation_tokens_total"),
        first_tokens_total=change.total("pagemill:time_to_first_token_seconds_count"),
    )


def _hit_share(change: Change, kind: str) -> float | None:
    hits = change.increase("pagemill:prompt_cache_hits_total", kind=kind)
    misses = change.increase("pagemill:prompt_cache_misses_total", kind=kind)
    return share(hits, None if hits is None or misses is None else hits + misses)


def scheduler_figures(address: str, change: Change) -> SchedulerFigures:
    """Figures of a scheduler from its own series."""
    hits = change.increase("pagemill:prefix_cache_hit_tokens_total")
    queries = change.increase("pagemill:prefix_cache_query_tokens_total")
    used, blocks = change.total("pagemill:kv_blocks_used"), change.total("pagemill:kv_blocks_total")
    return SchedulerFigures(
        address=address,
        seen_by="",
        is_connected=True,
        workers=change.total("pagemill:workers"),
        running=change.total("pagemill:num_requests_running"),
        waiting=change.total("pagemill:num_requests_waiting"),
        kv_blocks_used=used,
        kv_blocks_total=blocks,
        kv_use=share(used, blocks),
        prefix_cache_hit_share=share(hits, queries),
        preemptions_per_s=change.rate("pagemill:preemptions_total"),
        steps_per_s=change.rate("pagemill:scheduler_steps_total"),
        preemptions_total=change.total("pagemill:preemptions_total"),
        steps_total=change.total("pagemill:scheduler_steps_total"),
    )


def schedulers_of_router(router: str, change: Change) -> list[SchedulerFigures]:
    """Figures of each scheduler that a router knows, from what the router exports again."""
    found = []
    for name in label_values(change.current, "pagemill:scheduler_up", "scheduler"):
        used = change.total("pagemill:kv_blocks_used", scheduler=name)
        blocks = change.total("pagemill:kv_blocks_total", scheduler=name)
        figures = SchedulerFigures(
            address=name,
            seen_by=router,
            is_connected=bool(change.value("pagemill:scheduler_up", scheduler=name)),
            workers=change.total("pagemill:workers", scheduler=name),
            running=change.total("pagemill:num_requests_running", scheduler=name),
            waiting=change.total("pagemill:num_requests_waiting", scheduler=name),
            kv_blocks_used=used,
            kv_blocks_total=blocks,
            kv_use=share(used, blocks),
            prefix_cache_hit_share=None,
            preemptions_per_s=change.rate("pagemill:preemptions_total", scheduler=name),
            steps_per_s=None,
            preemptions_total=change.total("pagemill:preemptions_total", scheduler=name),
            steps_total=None,
        )
        found.append(figures)
    return found


def merge_schedulers(own: Sequence[SchedulerFigures], routed: Sequence[SchedulerFigures]) -> list[SchedulerFigures]:
    """One row per scheduler.

    Of several routers that know a scheduler, the first with a session to it counts. A router names schedulers by
    another port than that of their metrics, so what routers tell is left out only where at least as many schedulers
    answered themselves.
    """
    by_name: dict[str, SchedulerFigures] = {}
    for figures in routed:
        known = by_name.get(figures.address)
        if known is None or (figures.is_connected and not known.is_connected):
            by_name[figures.address] = figures
    return list(own) if len(own) >= len(by_name) else [*own, *by_name.values()]


def worker_figures(address: str, change: Change) -> WorkerFigures:
    """Figures of a worker from its own series."""
    step = change.histogram("pagemill:worker_step_seconds")
    gap = change.histogram("pagemill:step_gap_seconds")
    mean_s = step.mean()
    replays = change.increase("pagemill:worker_graph_replays_total")
    return WorkerFigures(
        address=address,
        steps_per_s=change.rate("pagemill:worker_steps_total"),
        tokens_per_s=change.rate("pagemill:worker_tokens_total"),
        step_ms=None if mean_s is None else 1000 * mean_s,
        gap_share=share(gap.sum, step.sum + gap.sum),
        graph_replay_share=share(replays, change.increase("pagemill:worker_decode_steps_total")),
        kv_blocks_total=change.total("pagemill:kv_blocks_total"),
        steps_total=change.total("pagemill:worker_steps_total"),
        tokens_total=change.total("pagemill:worker_tokens_total"),
    )
