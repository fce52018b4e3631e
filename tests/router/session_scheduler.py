"""A scheduler in this process whose tokens are written beforehand, behind the real Session protocol on loopback.

It resumes behind delivered tokens, as a scheduler must, so that what a client gets over a loss can be compared with the
script.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from pagemill.rpc import aio_server, bind
from pagemill.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc

Script = Callable[[scheduler_pb2.Submit, int], list[int]]


def hello(**changes: Any) -> scheduler_pb2.SchedulerHello:
    """What a ready scheduler of the demo model says."""
    values: dict[str, Any] = {
        "scheduler_id": "fake",
        "version": "0",
        "model": "demo",
        "model_fingerprint": "weights-1",
        "max_model_len": 8192,
        "vocab_size": 49152,
        "block_size": 16,
        "ready": True,
        "kv_capacity_tokens": 1 << 20,
    }
    return scheduler_pb2.SchedulerHello(**(values | changes))


@dataclass
class Row:
    """One sequence of one request."""

    handle: int
    index: int
    tokens: list[int]
    position: int


@dataclass
class Session:
    """One router's stream."""

    outbox: asyncio.Queue[scheduler_pb2.SchedulerMessage | None]
    submits: dict[int, scheduler_pb2.Submit] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Set `script` to what sequences say; a script longer than max_tokens ends by length, a shorter one by stop.

    Attributes:
        step_s: time of a step.
        max_steps: no step is made beyond this number while it is set: a way to stand still.
        refuse: an error for the next submissions, newest last.
        submits, aborts: all that came, over all sessions.
    """

    def __init__(self, script: Script, **hello_changes: Any) -> None:
        self.script = script
        self.hello = hello(**hello_changes)
        self.step_s = 0.001
        self.max_steps: int | None = None
        self.refuse: list[common_pb2.Error] = []
        self.submits: list[scheduler_pb2.Submit] = []
        self.aborts: list[scheduler_pb2.Abort] = []
        self.num_steps = 0
        self.sessions: list[Session] = []
        self.address = ""
        self._server: Any = None

    async def start(self, port: int = 0) -> None:
        self._server = aio_server()
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', port)}"
        await self._server.start()

    async def stop(self) -> None:
        self.drop_sessions()
        await self._server.stop(0)

    async def restart(self) -> None:
        """Lose everything and come back at the same address."""
        port = int(self.address.rpartition(":")[2])
        await self.stop()
        await self.start(port)

    def drop_sessions(self) -> None:
        """Cut every router off."""
        for session in self.sessions:
            session.outbox.put_nowait(None)

    def say(self, message: scheduler_pb2.SchedulerMessage) -> None:
        for session in self.sessions:
            session.outbox.put_nowait(message)

    @property
    def num_live_rows(self) -> int:
        return sum(len(session.rows) for session in self.sessions)

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[scheduler_pb2.SchedulerMessage]:
        session = Session(asyncio.Queue())
        tasks = [
            asyncio.create_task(self._read(session, request_iterator)),
            asyncio.create_task(self._step_for_ever(session)),
        ]
        self.sessions.append(session)
        try:
            yield scheduler_pb2.SchedulerMessage(hello=self.hello)
            while (message := await session.outbox.get()) is not None:
                yield message
        finally:
            self.sessions.remove(session)
            for task in tasks:
                task.cancel()

    async def _read(self, session: Session, messages: Any) -> None:
        with contextlib.suppress(grpc.aio.BaseError):  # the router is gone
            async for message in messages:
                kind = message.WhichOneof("message")
                if kind == "submit":
                    self._submit(session, message.submit)
                elif kind == "abort":
                    self._abort(session, message.abort)

    def _submit(self, session: Session, submit: scheduler_pb2.Submit) -> None:
        self.submits.append(submit)
        if self.refuse:
            error = scheduler_pb2.RequestError(handle=submit.handle, error=self.refuse.pop(0))
            session.outbox.put_nowait(scheduler_pb2.SchedulerMessage(output=scheduler_pb2.StepOutput(errors=[error])))
            return
        session.submits[submit.handle] = submit
        delivered = {d.index: d for d in submit.delivered}
        for index in range(submit.sampling.n or 1):
            before = delivered.get(index)
            if before is not None and before.finished:
                continue
            tokens = self.script(submit, index)
            start = len(before.token_ids) if before is not None else 0
            assert before is None or list(before.token_ids) == tokens[:start], "delivered tokens are not the script's"
            session.rows.append(Row(submit.handle, index, tokens, start))

    def _abort(self, session: Session, abort: scheduler_pb2.Abort) -> None:
        self.aborts.append(abort)
        of_request = [row for row in session.rows if row.handle == abort.handle]
        gone = [row for row in of_request if not abort.HasField("index") or row.index == abort.index]
        output = scheduler_pb2.StepOutput()
        for row in gone:
            session.rows.remove(row)
            self._finish(session, output, row, common_pb2.FINISH_REASON_ABORT)
        if gone:
            session.outbox.put_nowait(scheduler_pb2.SchedulerMessage(output=output))

    async def _step_for_ever(self, session: Session) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            if session.rows and (self.max_steps is None or self.num_steps < self.max_steps):
                self.num_steps += 1
                session.outbox.put_nowait(scheduler_pb2.SchedulerMessage(output=self._step(session)))

    def _step(self, session: Session) -> scheduler_pb2.StepOutput:
        output = scheduler_pb2.StepOutput(step=self.num_steps)
        for row in list(session.rows):
            submit = session.submits[row.handle]
            if submit.sampling.HasField("prompt_logprobs") and row.position == 0 and row.index == 0:
                columns = _columns(submit.token_ids[1:], submit.sampling.prompt_logprobs)
                output.prompt_logprobs.append(scheduler_pb2.PromptLogprobs(handle=row.handle, columns=columns))
            token = row.tokens[row.position]
            if submit.sampling.HasField("logprobs"):
                columns = _columns([token], submit.sampling.logprobs)
                output.logprobs.append(scheduler_pb2.RunLogprobs(run=len(output.handles), columns=columns))
            output.handles.append(row.handle)
            output.indexes.append(row.index)
            output.counts.append(1)
            output.token_ids.append(token)
            row.position += 1
            if row.position in (len(row.tokens), submit.sampling.max_tokens):
                by_length = row.position == submit.sampling.max_tokens
                reason = common_pb2.FINISH_REASON_LENGTH if by_length else common_pb2.FINISH_REASON_STOP
                session.rows.remove(row)
                self._finish(session, output, row, reason)
        return output

    def _finish(self, session: Session, output: scheduler_pb2.StepOutput, row: Row, reason: int) -> None:
        submit = session.submits[row.handle]
        end = scheduler_pb2.Finished(handle=row.handle, index=row.index, reason=reason)  # type: ignore[arg-type]
        last = row.tokens[row.position - 1]
        if reason == common_pb2.FINISH_REASON_STOP and last in submit.sampling.stop_token_ids:
            end.stop_token_id = last
        if not any(r.handle == row.handle for r in session.rows):
            end.request_finished = True
            end.usage.prompt_tokens = len(submit.token_ids)
            end.usage.cached_tokens = 16
            end.usage.completion_tokens = 999  # the router counts what it delivered
            end.timings.arrival_unix_ns = time.time_ns()
        output.finished.append(end)


def _columns(token_ids: Any, num_top: int) -> common_pb2.LogprobColumns:
    ids = list(token_ids)
    return common_pb2.LogprobColumns(
        chosen=[-0.5] * len(ids),
        ranks=[1] * len(ids),
        num_top=num_top,
        top_ids=[i for token in ids for i in range(token, token + num_top)],
        top_logprobs=[-0.5] * (len(ids) * num_top),
    )
