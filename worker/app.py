"""The worker process: loads a model, attaches to its scheduler, executes steps until told to stop."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from types import FrameType

import torch
from opentelemetry.trace import Span, Tracer

from pagemill.config import WorkerSettings
from pagemill.errors import DesyncError
from pagemill.garbage_collector import settle_garbage_collector
from pagemill.step import StepPlan, StepResult
from pagemill.telemetry import (
    link_from_traceparent,
    setup_logging,
    setup_tracing,
    shutdown_tracing,
    start_metrics_server,
    tracer,
)
from pagemill.v1 import worker_pb2
from worker import wire
from worker.gpu_metrics import export_gpu
from worker.link import Backoff, SchedulerStream, StreamEndedError
from worker.metrics import WorkerMetrics
from worker.model_runner import ModelRunner
from worker.pending_step import PendingStep
from worker.profile import StepProfile

logger = logging.getLogger(__name__)

PARENT_PID_ENV = "PAGEMILL_PARENT_PID"
_POLL_S = 0.2
# While a step runs and another may be launched: how long to listen for a plan before the step is looked at again.
_BUSY_POLL_S = 50e-6
_PR_SET_PDEATHSIG = 1


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    Raises:
        ConfigError, ModelLoadError, NativeLibraryError: the worker cannot start.
    """
    setup_logging("worker", settings)
    setup_tracing("worker", settings)
    # Until there is something to drain, a signal just ends the process.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_now)
    follow_parent(os.environ.get(PARENT_PID_ENV, ""))
    # torch only holds and casts tensors here; a second pool of threads would compete with the kernels' own.
    torch.set_num_threads(1)
    try:
        runner = ModelRunner(settings)
        metrics = WorkerMetrics(runner.capacity)
        export_gpu(metrics.registry, runner.device)
        metrics_port = start_metrics_server(settings, metrics.registry)
        shutdown = Shutdown()
        shutdown.install()
        settle_garbage_collector()
        WorkerProcess(settings, runner, metrics, shutdown, metrics_port).serve()
    finally:
        shutdown_tracing()
    return 0


def _exit_now(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def follow_parent(parent_pid: str) -> None:
    """Get SIGTERM when the process `parent_pid` (a decimal number; empty: nobody) dies, and exit if it already has."""
    if not parent_pid.isdecimal():
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent_pid):
        logger.error("parent process %s is gone", parent_pid)
        sys.exit(0)


class Shutdown:
    """SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once with code 1."""

    def __init__(self) -> None:
        self._requested = threading.Event()

    def install(self) -> None:
        """Take over both signals. Call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            os._exit(1)
        self._requested.set()

    def request(self) -> None:
        """Ask for a drain, as the first signal does."""
        self._requested.set()

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep; True as soon as a drain is asked for."""
        return self._requested.wait(timeout_s)


class WorkerProcess:
    """Attaches, executes and attaches again. All of it runs on the thread that calls `serve`."""

    def __init__(
        self,
        settings: WorkerSettings,
        runner: ModelRunner,
        metrics: WorkerMetrics,
        shutdown: Shutdown,
        metrics_port: int | None,
    ) -> None:
        self._settings = settings
        self._runner = runner
        self._metrics = metrics
        self._shutdown = shutdown
        self._metrics_port = metrics_port
        self._worker_id = wire.default_worker_id(os.getpid())
        self._tracer = tracer("worker.step")
        self._announced = False
        self._profile: StepProfile | None = None

    def serve(self) -> None:
        """Stay attached to the scheduler until a shutdown is requested and drained."""
        backoff = Backoff(self._shutdown.wait)
        last_reason = ""
        while not self._shutdown.requested:
            stream = SchedulerStream(self._settings.scheduler, self._hello())
            try:
                attached = stream.attached()
                backoff.reset()
                last_reason = ""
                self._announce(attached)
                self._runner.begin_epoch(attached.epoch)
                self._execute_steps(stream)
                stream.close(flush_timeout_s=1.0)
            except StreamEndedError as error:
                stream.close()
                if error.message != last_reason:  # one line per cause, not per attempt
                    logger.warning("not attached: %s", error.message)
                    last_reason = error.message
            except DesyncError as error:
                stream.close()
                logger.error("FAILED_PRECONDITION: %s; attaching again", error.message)
            if not self._shutdown.requested and backoff.sleep():
                return

    def _hello(self) -> worker_pb2.WorkerMessage:
        runner = self._runner
        return wire.hello_to_proto(
            runner.capacity,
            worker_id=self._worker_id,
            model=runner.model_name,
            fingerprint=runner.fingerprint,
            device=runner.device.name,
        )

    def _announce(self, attached: worker_pb2.Attached) -> None:
        self._metrics.attached()
        logger.info("attached to scheduler %s, epoch %d", attached.scheduler_id, attached.epoch)
        if not self._announced:
            self._announced = True
            ready = {
                "service": "worker",
                "worker_id": self._worker_id,
                "scheduler": self._settings.scheduler,
                "metrics_port": self._metrics_port,
            }
            print(f"pagemill-ready {json.dumps(ready)}", flush=True)

    def _execute_steps(self, stream: SchedulerStream) -> None:
        """Execute what arrives until the scheduler says drain, or our own drain is over.

        Raises:
            StreamEndedError, DesyncError: as they come, except for an ended stream while draining.
        """
        steps = StepsInFlight(self._runner, self._tracer)
        drain_until: float | None = None
        while True:
            if drain_until is None and self._shutdown.requested:
                drain_until = time.monotonic() + self._settings.drain_timeout_s
                logger.info("draining")
                stream.send(wire.draining_to_proto("shutdown requested"))
            if drain_until is not None and time.monotonic() > drain_until:
                logger.warning("drain timeout of %g s passed", self._settings.drain_timeout_s)
                return
            if steps.has_result:
                self._send_result(stream, steps)
                continue
            try:
                message = stream.receive(_BUSY_POLL_S if steps else _POLL_S)
            except StreamEndedError:
                if drain_until is not None:
                    return
                raise
            if message is None:
                continue
            kind = message.WhichOneof("message")
            if kind == "step":
                steps.launch(wire.plan_from_proto(message.step))
            elif kind == "drain":
                while steps:
                    self._send_result(stream, steps)
                logger.info("the scheduler drains this worker")
                return
            elif kind == "profile":
                self._profile = StepProfile(message.profile.num_steps) if message.profile.num_steps else None

    def _send_result(self, stream: SchedulerStream, steps: StepsInFlight) -> None:
        plan, result = steps.take()
        stream.send(wire.result_to_proto(result))
        self._metrics.observe(plan, result)
        if self._profile is not None and self._profile.add(plan, result):
            self._profile = None


class StepsInFlight:
    """Launched steps whose results are to be taken, oldest first."""

    def __init__(self, runner: ModelRunner, step_tracer: Tracer) -> None:
        self._runner = runner
        self._tracer = step_tracer
        self._steps: deque[tuple[StepPlan, PendingStep, Span | None]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_result(self) -> bool:
        """The oldest result is to be taken now: it is there, or no further step may be launched before it is."""
        if not self._steps:
            return False
        return len(self._steps) >= self._runner.max_steps_in_flight or self._steps[0][1].is_done

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises DesyncError."""
        span = None
        if plan.trace_links:
            links = [link for link in map(link_from_traceparent, plan.trace_links) if link is not None]
            span = self._tracer.start_span("worker.step", links=links)
            span.set_attributes({"pagemill.rows": plan.num_rows, "pagemill.tokens": sum(plan.num_tokens)})
        self._steps.append((plan, self._runner.launch(plan), span))

    def take(self) -> tuple[StepPlan, StepResult]:
        """Wait for the oldest step."""
        plan, step, span = self._steps.popleft()
        result = step.result()
        if span is not None:
            span.end()
        return plan, result
