"""The metrics that dashboards made for vLLM ask for: the same numbers under those names, read when scraped.

Each name is exported by one kind of process, so that a sum over all processes counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagemill.config import CommonSettings

Aliases = Mapping[str, tuple[str, ...]]
"""Names of metric families and what they are called besides, both without the `_total` of counters."""

# Measured where the client is answered.
ROUTER_ALIASES: Aliases = {
    "pagemill:time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "pagemill:inter_token_latency_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "pagemill:e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "pagemill:prompt_tokens": ("vllm:prompt_tokens",),
    "pagemill:generation_tokens": ("vllm:generation_tokens",),
    "pagemill:request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "pagemill:request_generation_tokens": ("vllm:request_generation_tokens",),
    "pagemill:request_success": ("vllm:request_success",),
}
# Known to the scheduler alone; routers, of which there may be several, re-export some under Pagemill's names.
SCHEDULER_ALIASES: Aliases = {
    "pagemill:num_requests_running": ("vllm:num_requests_running",),
    "pagemill:num_requests_waiting": ("vllm:num_requests_waiting",),
    "pagemill:kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "pagemill:preemptions": ("vllm:num_preemptions",),
    "pagemill:prefix_cache_hit_tokens": ("vllm:prefix_cache_hits",),
    "pagemill:prefix_cache_query_tokens": ("vllm:prefix_cache_queries",),
    "pagemill:request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "pagemill:request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "pagemill:request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
}


class _WithAliases(Collector):
    """All that a registry has, and some of it once more under other names."""

    def __init__(self, registry: CollectorRegistry, aliases: Aliases, model_name: Callable[[], str]) -> None:
        self._registry, self._aliases, self._model_name = registry, aliases, model_name

    def collect(self) -> Iterator[Metric]:
        model_name = self._model_name()
        for family in self._registry.collect():
            yield family
            # A series without its model would stay behind as one of its own.
            for alias in self._aliases.get(family.name, ()) if model_name else ():
                yield _renamed(family, alias, model_name)


def _renamed(family: Metric, alias: str, model_name: str) -> Metric:
    renamed = Metric(alias, family.documentation, family.type)
    renamed.samples = [
        sample._replace(
            name=alias + sample.name.removeprefix(family.name), labels={**sample.labels, "model_name": model_name}
        )
        for sample in family.samples
    ]
    return renamed


def exported_registry(
    settings: CommonSettings, registry: CollectorRegistry, aliases: Aliases, model_name: Callable[[], str]
) -> CollectorRegistry:
    """What a process shows of its metrics: `registry`, with `metrics_vllm_names` also under the names of `aliases`.

    Args:
        settings: of the process.
        registry: all metrics of the process; may still grow.
        aliases: of this kind of process.
        model_name: value of the label `model_name`; while it is "" there are no aliases. Called on the thread of the
            scrape.
    """
    if not settings.metrics_vllm_names:
        return registry
    shown = CollectorRegistry()
    shown.register(_WithAliases(registry, aliases, model_name))
    return shown
