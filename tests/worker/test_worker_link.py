"""The worker process against a scripted scheduler on a real gRPC server: attach, steps, loss, desync, drain."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import torch
from worker_harness import runner_for, save_checkpoint, tiny_model

from pagemill.config import WorkerSettings
from pagemill.rpc import server_options
from pagemill.v1 import common_pb2, scheduler_pb2_grpc, worker_pb2
from worker.app import PARENT_PID_ENV, Shutdown, WorkerProcess
from worker.metrics import WorkerMetrics
from worker.step_device import CopyingDevice

DEADLINE_S = 60.0


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Hands each worker's stream to the test: `streams` yields (received, to_send) queues. None ends a stream."""

    def __init__(self) -> None:
        self.streams: queue.Queue[ScriptedStream] = queue.Queue()
        self.epoch = 0

    def AttachWorker(
        self, request_iterator: Iterator[worker_pb2.WorkerMessage], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.StepMessage]:
        self.epoch += 1
        stream = ScriptedStream(self.epoch, context)
        hello = next(request_iterator)
        stream.hello = hello.hello
        self.streams.put(stream)
        puller = futures.ThreadPoolExecutor(1)
        puller.submit(stream.pull, request_iterator)
        yield worker_pb2.StepMessage(attached=worker_pb2.Attached(epoch=self.epoch, scheduler_id="scripted"))
        while (message := stream.to_send.get(timeout=DEADLINE_S)) is not None:
            yield message


class ScriptedStream:
    """One attached worker."""

    def __init__(self, epoch: int, context: grpc.ServicerContext) -> None:
        self.epoch = epoch
        self.context = context
        self.hello = worker_pb2.WorkerHello()
        self.received: queue.Queue[worker_pb2.WorkerMessage | None] = queue.Queue()
        self.to_send: queue.Queue[worker_pb2.StepMessage | None] = queue.Queue()

    def pull(self, messages: Iterator[worker_pb2.WorkerMessage]) -> None:
        try:
            for message in messages:
                self.received.put(message)
        except Exception:  # the worker cancelled
            pass
        self.received.put(None)

    def first_step(self, **overrides: int) -> worker_pb2.StepMessage:
        step = worker_pb2.Step(
            epoch=self.epoch,
            step=0,
            new_sequences=[
                worker_pb2.NewSequence(
                    slot=0,
                    token_ids=[4, 5, 6],
                    num_prompt_tokens=3,
                    block_ids=[3],
                    sampling=common_pb2.SamplingParams(temperature=0.0),
                )
            ],
            slots=[0],
            num_tokens=[3],
            sample=[True],
            new_block_counts=[0],
        )
        for name, value in overrides.items():
            setattr(step, name, value)
        return worker_pb2.StepMessage(step=step)

    def next_step(self, number: int) -> worker_pb2.StepMessage:
        return worker_pb2.StepMessage(
            step=worker_pb2.Step(
                epoch=self.epoch, step=number, slots=[0], num_tokens=[1], sample=[True], new_block_counts=[0]
            )
        )

    def result(self) -> worker_pb2.StepResult:
        message = self.received.get(timeout=DEADLINE_S)
        assert message is not None
        assert message.WhichOneof("message") == "result"
        return message.result


class Scheduler:
    """A server with one scripted servicer."""

    def __init__(self, port: int = 0) -> None:
        self.servicer = ScriptedScheduler()
        self.server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options())
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self.servicer, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def stream(self) -> ScriptedStream:
        return self.servicer.streams.get(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_model("LlamaForCausalLM"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.server.stop(None).wait(DEADLINE_S)


@pytest.fixture(params=[1, 2], ids=["one-in-flight", "two-in-flight"])
def attached(
    request: pytest.FixtureRequest, scheduler: Scheduler, checkpoint: Path
) -> Iterator[tuple[Scheduler, ScriptedStream, Shutdown]]:
    """A worker's serve loop in a thread, attached."""
    runner = runner_for(checkpoint, step_device=CopyingDevice(torch.device("cpu")) if request.param == 2 else None)
    assert runner.max_steps_in_flight == request.param
    shutdown = Shutdown()
    settings = WorkerSettings(scheduler=f"127.0.0.1:{scheduler.port}", drain_timeout_s=5.0)
    process = WorkerProcess(settings, runner, WorkerMetrics(runner.capacity), shutdown, None)
    pool = futures.ThreadPoolExecutor(1)
    serving = pool.submit(process.serve)
    stream = scheduler.stream()
    yield scheduler, stream, shutdown
    shutdown.request()
    stream.to_send.put(None)
    serving.result(DEADLINE_S)


Attached = tuple[Scheduler, ScriptedStream, Shutdown]


def test_hello_then_steps_then_results(attached: Attached) -> None:
    _, stream, _ = attached
    assert (stream.hello.vocab_size, stream.hello.num_blocks, stream.hello.num_slots) == (320, 256, 8)
    assert len(stream.hello.model_fingerprint) == 32
    stream.to_send.put(stream.first_step())
    stream.to_send.put(stream.next_step(1))  # two steps in flight: the token is known to the worker alone
    first, second = stream.result(), stream.result()
    assert (first.epoch, first.step, second.step) == (stream.epoch, 0, 1)
    assert len(first.sampled_token_ids) == len(second.sampled_token_ids) == 1
    assert first.forward_ns > 0
    assert second.gap_ns > 0


def test_steps_are_answered_in_order_and_counted(scheduler: Scheduler, checkpoint: Path) -> None:
    runner = runner_for(checkpoint, step_device=CopyingDevice(torch.device("cpu")))
    shutdown, metrics = Shutdown(), WorkerMetrics(runner.capacity)
    settings = WorkerSettings(scheduler=f"127.0.0.1:{scheduler.port}", drain_timeout_s=5.0)
    pool = futures.ThreadPoolExecutor(1)
    serving = pool.submit(WorkerProcess(settings, runner, metrics, shutdown, None).serve)
    stream = scheduler.stream()
    stream.to_send.put(stream.first_step())
    for number in range(1, 10):
        stream.to_send.put(stream.next_step(number))
    assert [stream.result().step for _ in range(10)] == list(range(10))
    stream.to_send.put(worker_pb2.StepMessage(drain=worker_pb2.Drain()))
    shutdown.request()
    stream.to_send.put(None)
    serving.result(DEADLINE_S)
    samples = {sample.name: sample.value for metric in metrics.registry.collect() for sample in metric.samples}
    assert samples["pagemill:worker_steps_total"] == 10
    assert samples["pagemill:worker_decode_steps_total"] == 9
    assert samples["pagemill:worker_graph_replays_total"] == 0
    assert samples["pagemill:worker_out_of_memory_total"] == 0


def test_a_desync_ends_the_stream_and_a_new_epoch_begins(attached: Attached) -> None:
    scheduler, stream, _ = attached
    stream.to_send.put(stream.first_step(step=5))
    assert stream.received.get(timeout=DEADLINE_S) is None
    again = scheduler.stream()
    assert again.epoch == stream.epoch + 1
    again.to_send.put(again.first_step())
    assert again.result().epoch == again.epoch
    again.to_send.put(None)


def test_a_lost_stream_is_dialled_again_with_no_sequence_left(attached: Attached) -> None:
    scheduler, stream, _ = attached
    stream.to_send.put(stream.first_step())
    expected = stream.result().sampled_token_ids
    stream.to_send.put(None)
    again = scheduler.stream()
    again.to_send.put(again.first_step())
    assert again.result().sampled_token_ids == expected
    again.to_send.put(None)


def test_a_drain_is_announced_and_steps_still_run(attached: Attached) -> None:
    _, stream, shutdown = attached
    stream.to_send.put(stream.first_step())
    stream.result()
    shutdown.request()
    message = stream.received.get(timeout=DEADLINE_S)
    assert message is not None
    assert message.WhichOneof("message") == "draining"
    stream.to_send.put(stream.next_step(1))
    assert stream.result().step == 1


def worker_process(checkpoint: Path, port: int, **environment: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from pagemill.config import WorkerSettings; from worker.app import run;"
        f"sys.exit(run(WorkerSettings(model={str(checkpoint)!r}, scheduler='127.0.0.1:{port}', device='cpu',"
        "num_blocks=64, max_num_seqs=4, drain_timeout_s=5)))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def test_sigterm_drains_and_exits_with_0(scheduler: Scheduler, checkpoint: Path) -> None:
    process = worker_process(checkpoint, scheduler.port)
    try:
        stream = scheduler.stream()
        assert process.stdout is not None
        assert process.stdout.readline().startswith('pagemill-ready {"service": "worker"')
        stream.to_send.put(stream.first_step())
        stream.result()
        process.send_signal(signal.SIGTERM)
        message = stream.received.get(timeout=DEADLINE_S)
        assert message is not None
        assert message.WhichOneof("message") == "draining"
        stream.to_send.put(None)
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def test_a_worker_whose_parent_is_gone_does_not_start(scheduler: Scheduler, checkpoint: Path) -> None:
    process = worker_process(checkpoint, scheduler.port, **{PARENT_PID_ENV: "1" if os.getpid() != 1 else "2"})
    try:
        assert process.wait(DEADLINE_S) == 0
        assert scheduler.servicer.streams.empty()
    finally:
        process.kill()
        process.wait(DEADLINE_S)
