"""Engines that throughput and latency compare: each takes prompts and says how long all answers took together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from pagemill.bench.arrivals import ClosedLoop
from pagemill.bench.load import LoadProcesses
from pagemill.bench.machine import device_name_here
from pagemill.bench.targets import Target
from pagemill.bench.workloads import FixedLengths, TokenSource
from pagemill.engine_args import EngineArgs
from pagemill.errors import PagemillError


class Engine(Protocol):
    """Something that generates.

    Attributes:
        backend: name in the rows: offline, http, grpc, or that of a peer.
        model: a server's name for it; empty where it is the one that was asked for.
        device: what it runs on.
    """

    model: str

    @property
    def backend(self) -> str: ...

    @property
    def device(self) -> str: ...

    def generate(self, workload: FixedLengths, count: int, at_once: int) -> Sequence[float]:
        """Generate answers for conversations 0 to `count` - 1, at most `at_once` at a time.

        Returns:
            Seconds from the first request to the last answer, then, where the engine streams, seconds to the first
            token of each answer.

        Raises:
            PagemillError: an answer failed, or does not have exactly the tokens that were asked for.
        """
        ...

    def close(self) -> None: ...


class OfflineEngine:
    """`pagemill.LLM` in this process: scheduler core and model runner, no gRPC."""

    backend = "offline"
    model = ""

    def __init__(self, args: EngineArgs) -> None:
        from dataclasses import fields

        from pagemill.llm import LLM

        self._llm = LLM(**{field.name: getattr(args, field.name) for field in fields(args)})
        self.device = device_name_here(args.device)

    def generate(self, workload: FixedLengths, count: int, at_once: int) -> Sequence[float]:
        """Batches of `at_once` one after the other: answers of one length end together."""
        from pagemill.sampling_params import SamplingParams

        prompts = [workload.conversation(index).turns[0].token_ids for index in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=workload.output_len, ignore_eos=True)
        begin_s = time.perf_counter()
        outputs = [
            output
            for first in range(0, count, at_once)
            for output in self._llm.generate(
                prompt_token_ids=prompts[first : first + at_once], sampling_params=params, use_tqdm=False
            )
        ]
        elapsed_s = time.perf_counter() - begin_s
        check_lengths([len(output.outputs[0].token_ids) for output in outputs], workload.output_len, count)
        return [elapsed_s]

    def close(self) -> None:
        self._llm.dispose()


class ServedEngine:
    """A server, asked by processes that make load. Streams, as clients do."""

    def __init__(self, target: Target, device: str, processes: LoadProcesses) -> None:
        self._target = target
        self.model = target.model
        self.device = device
        self._processes = processes

    @property
    def backend(self) -> str:
        return self._target.backend

    def generate(self, workload: FixedLengths, count: int, at_once: int) -> Sequence[float]:
        schedule = ClosedLoop(min(at_once, count), count)
        result = self._processes.run(self._target, workload, schedule)
        result.require_all()
        return [result.elapsed_s, *(answer.first_token_s for answer in result.answers)]

    def close(self) -> None:
        pass


def check_lengths(lengths: Sequence[int], asked: int, count: int) -> None:
    """Raises PagemillError unless there are `count` answers of `asked` tokens each."""
    if len(lengths) != count:
        raise PagemillError(f"{len(lengths)} answers came, {count} were asked for")
    wrong = [length for length in lengths if length != asked]
    if wrong:
        raise PagemillError(
            f"{len(wrong)} of {count} answers have a wrong length, such as {wrong[0]} tokens, not {asked}"
        )


class FreshWorkloads:
    """Workloads none of whose prompts was seen before, so that no cache of prompts helps a repeat."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._num_made = 0

    def make(self, input_len: int, output_len: int) -> FixedLengths:
        self._num_made += 1
        # Spread wide: the seeds of two runs with neighbouring --seed have no workload in common.
        return FixedLengths(
            TokenSource(self._vocab_size, self._seed * 1_000_003 + self._num_made), input_len, output_len
        )
