"""Peers of a scheduler over real gRPC: a worker that speaks AttachWorker on a `FakeModel`, and a router's session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from scheduler_fakes import FakeModel

from pagemill.rpc import aio_channel
from pagemill.step import NewSequence, SlotSampling, StepPlan, WorkerCapacity
from pagemill.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, worker_pb2

VOCAB = 997
DEADLINE_S = 20.0


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll until something holds."""
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, f"timed out: {what}"
        await asyncio.sleep(0.002)


def plan_from_proto(step: worker_pb2.Step) -> StepPlan:
    return StepPlan(
        step.epoch,
        step.step,
        list(step.released_slots),
        [
            NewSequence(
                new.slot,
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                list(new.block_ids),
                SlotSampling(
                    seed=new.sampling.seed,
                    num_prompt_logprobs=new.sampling.prompt_logprobs
                    if new.sampling.HasField("prompt_logprobs")
                    else -1,
                ),
            )
            for new in step.new_sequences
        ],
        list(step.slots),
        list(step.num_tokens),
        list(step.sample),
        list(step.new_block_counts),
        list(step.new_block_ids),
        list(step.copy_sources),
        list(step.copy_destinations),
        list(step.trace_links),
    )


class PeerWorker:
    """A worker process in miniature. `gate` pauses it between steps; `die_after` kills its stream."""

    def __init__(
        self,
        address: str,
        *,
        name: str = "w0",
        fingerprint: str = "f",
        num_blocks: int = 256,
        step_s: float = 0.0,
        max_model_len: int = 2048,
    ) -> None:
        self.capacity = WorkerCapacity(num_blocks, 4, 64, max_model_len, VOCAB, 256)
        self.model = FakeModel(self.capacity)
        self.gate = asyncio.Event()
        self.gate.set()
        self.die_after: int | None = None
        self.skip_step = False
        self.attached: worker_pb2.Attached | None = None
        self.end: grpc.aio.AioRpcError | None = None
        self.drained = asyncio.Event()
        self.num_results = 0
        self.profiled_steps = 0
        self._writing = asyncio.Lock()
        self.trace_links: list[str] = []
        self._step_s = step_s
        self._channel = aio_channel(address)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).AttachWorker()
        hello = worker_pb2.WorkerHello(
            worker_id=name,
            model="fake",
            model_fingerprint=fingerprint,
            world_size=1,
            num_blocks=num_blocks,
            block_size=4,
            num_slots=64,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_step_tokens=256,
        )
        self._hello = worker_pb2.WorkerMessage(hello=hello)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._call.write(self._hello)
            while (message := await self._call.read()) is not grpc.aio.EOF:
                kind = message.WhichOneof("message")
                if kind == "attached":
                    self.attached = message.attached
                    self.model.epoch = message.attached.epoch
                elif kind == "step":
                    await self._execute(message.step)
                elif kind == "profile":
                    self.profiled_steps += message.profile.num_steps
                elif kind == "drain":
                    self.drained.set()
                    await self._call.done_writing()
        except grpc.aio.AioRpcError as error:
            self.end = error
        except (asyncio.CancelledError, asyncio.InvalidStateError):
            pass
        if self.end is None and self._call.done() and not self._call.cancelled():
            code = await self._call.code()
            if code is not grpc.StatusCode.OK:
                self.end = grpc.aio.AioRpcError(code, None, None, details=await self._call.details())  # type: ignore[arg-type]

    async def _execute(self, step: worker_pb2.Step) -> None:
        await self.gate.wait()
        if self._step_s:
            await asyncio.sleep(self._step_s)
        if self.die_after is not None and self.num_results >= self.die_after:
            self._call.cancel()
            return
        self.trace_links += step.trace_links
        result = self.model.execute(plan_from_proto(step))
        message = worker_pb2.StepResult(
            epoch=result.epoch,
            step=result.step + self.skip_step,
            sampled_token_ids=result.sampled_token_ids,
            failures=[
                worker_pb2.SlotFailure(slot=f.slot, error=common_pb2.Error(code=13, message=f.message))
                for f in result.failures
            ],
            prompt_logprobs=[
                worker_pb2.ChunkLogprobs(
                    slot=c.slot,
                    first_position=c.first_position,
                    columns=common_pb2.LogprobColumns(chosen=c.logprobs.chosen, ranks=c.logprobs.ranks),
                )
                for c in result.prompt_logprobs
            ],
        )
        self.num_results += 1
        await self._write(worker_pb2.WorkerMessage(result=message))

    async def _write(self, message: worker_pb2.WorkerMessage) -> None:
        async with self._writing:  # a call takes one message at a time, and fails otherwise
            await self._call.write(message)

    async def leave(self, reason: str = "test") -> None:
        await self._write(worker_pb2.WorkerMessage(draining=worker_pb2.WorkerDraining(reason=reason)))

    async def close(self) -> None:
        self._call.cancel()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._channel.close()


class PeerRouter:
    """A router's session; collects everything by handle."""

    def __init__(self, address: str) -> None:
        self.hello: scheduler_pb2.SchedulerHello | None = None
        self.loads: list[scheduler_pb2.LoadReport] = []
        self.tokens: dict[int, dict[int, list[int]]] = {}
        self.finished: dict[int, dict[int, scheduler_pb2.Finished]] = {}
        self.errors: dict[int, common_pb2.Error] = {}
        self.prompt_logprobs: dict[int, list[float]] = {}
        self.end: grpc.aio.AioRpcError | None = None
        self._channel = aio_channel(address)
        self.call = scheduler_pb2_grpc.SchedulerStub(self._channel).Session()
        self.reading = asyncio.Event()
        self.reading.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.call.write(scheduler_pb2.RouterMessage(hello=scheduler_pb2.RouterHello(router_id="r")))
            while True:
                await self.reading.wait()
                message = await self.call.read()
                if message is grpc.aio.EOF:
                    break
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.end = error
        except asyncio.CancelledError:
            return
        if self.end is None:
            code = await self.call.code()
            self.end = grpc.aio.AioRpcError(code, None, None, details=await self.call.details())  # type: ignore[arg-type]

    def _take(self, message: scheduler_pb2.SchedulerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self.hello = message.hello
        elif kind == "load":
            self.loads.append(message.load)
        else:
            output = message.output
            tokens = iter(output.token_ids)
            for handle, index, count in zip(output.handles, output.indexes, output.counts, strict=True):
                got = self.tokens.setdefault(handle, {}).setdefault(index, [])
                assert index not in self.finished.get(handle, {})
                got += [next(tokens) for _ in range(count)]
            for finished in output.finished:
                assert finished.index not in self.finished.setdefault(finished.handle, {})
                self.finished[finished.handle][finished.index] = finished
            for error in output.errors:
                assert error.handle not in self.errors
                self.errors[error.handle] = error.error
            for entry in output.prompt_logprobs:
                self.prompt_logprobs[entry.handle] = list(entry.columns.chosen)

    async def submit(self, handle: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> None:
        sampling = common_pb2.SamplingParams(
            max_tokens=max_tokens, seed=fields.pop("seed", 5), n=fields.pop("n", 1), **fields.pop("sampling", {})
        )
        submit = scheduler_pb2.Submit(handle=handle, token_ids=prompt, sampling=sampling, **fields)
        await self.call.write(scheduler_pb2.RouterMessage(submit=submit))

    async def abort(self, handle: int, index: int | None = None) -> None:
        await self.call.write(scheduler_pb2.RouterMessage(abort=scheduler_pb2.Abort(handle=handle, index=index)))

    def is_over(self, handle: int) -> bool:
        return handle in self.errors or any(f.request_finished for f in self.finished.get(handle, {}).values())

    async def wait(self, *handles: int) -> None:
        await until(lambda: all(self.is_over(h) for h in handles), f"requests {handles}")

    async def close(self) -> None:
        self.call.cancel()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._channel.close()
