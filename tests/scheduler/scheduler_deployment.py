"""A scheduler process in the test's loop, with its peers around it."""

from __future__ import annotations

from typing import Any

from scheduler_fakes import expected_tokens
from scheduler_peers import VOCAB, PeerRouter, PeerWorker, until

from pagemill.config import SchedulerSettings
from pagemill.sampling_params import sequence_seed
from scheduler.app import SchedulerProcess


class Deployment:
    """A scheduler in this loop, and its peers."""

    def __init__(self, **settings: Any) -> None:
        self.process = SchedulerProcess(SchedulerSettings(port=0, check_integrity=True, **settings))
        self.peers: list[PeerWorker | PeerRouter] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.process.port}"

    async def worker(self, *, wait: bool = True, **options: Any) -> PeerWorker:
        worker = PeerWorker(self.address, **options)
        self.peers.append(worker)
        if wait:
            await until(lambda: worker.attached is not None, "attached")
        return worker

    async def router(self) -> PeerRouter:
        router = PeerRouter(self.address)
        self.peers.append(router)
        await until(lambda: router.hello is not None, "hello")
        return router

    def metric(self, name: str, **labels: str) -> float:
        value = self.process.metrics.registry.get_sample_value(f"pagemill:{name}", labels)
        assert value is not None
        return value

    async def idle(self) -> None:
        gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        await until(lambda: not any(self.metric(g) for g in gauges), "all gauges 0")
        assert self.process.dispatcher.num_requests == 0


def solo(prompt: list[int], count: int, index: int = 0) -> list[int]:
    return expected_tokens(prompt, sequence_seed(5, index), count, VOCAB)
