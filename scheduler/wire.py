"""The scheduler's only translation between protobuf and its plain records."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from importlib.metadata import PackageNotFoundError, version

from pagemill import sampling_params
from pagemill.errors import InvalidRequestError, OverloadedError, PagemillError
from pagemill.step import (
    NewSequence,
    PromptChunkLogprobs,
    SlotFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerCapacity,
)
from pagemill.v1 import common_pb2, scheduler_pb2, worker_pb2
from scheduler.metrics import CoreTotals
from scheduler.sequence import DeliveredTokens, FinishedSequence, NewRequest, OwnerOutput


def package_version() -> str:
    """Version of the installed distribution."""
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0.0.0"


# Scheduler and worker.


def plan_to_proto(plan: StepPlan) -> worker_pb2.StepMessage:
    """The message that carries a plan down."""
    return worker_pb2.StepMessage(
        step=worker_pb2.Step(
            epoch=plan.epoch,
            step=plan.step,
            released_slots=plan.released_slots,
            new_sequences=[_sequence_to_proto(sequence) for sequence in plan.new_sequences],
            slots=plan.slots,
            num_tokens=plan.num_tokens,
            sample=plan.sample,
            new_block_counts=plan.new_block_counts,
            new_block_ids=plan.new_block_ids,
            copy_sources=plan.copy_sources,
            copy_destinations=plan.copy_destinations,
            trace_links=plan.trace_links,
        )
    )


def _sequence_to_proto(sequence: NewSequence) -> worker_pb2.NewSequence:
    sampling = sequence.sampling
    params = common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        logit_bias=sampling.logit_bias,
        logprobs=None if sampling.num_logprobs < 0 else sampling.num_logprobs,
        prompt_logprobs=None if sampling.num_prompt_logprobs < 0 else sampling.num_prompt_logprobs,
    )
    return worker_pb2.NewSequence(
        slot=sequence.slot,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        sampling=params,
        masked_until_min_tokens=sampling.masked_until_min_tokens,
    )


def result_from_proto(msg: worker_pb2.StepResult) -> StepResult:
    """A result from its message; the core checks that it fits its step."""
    return StepResult(
        epoch=msg.epoch,
        step=msg.step,
        sampled_token_ids=list(msg.sampled_token_ids),
        logprobs={entry.position: _columns_from_proto(entry.columns) for entry in msg.logprobs},
        prompt_logprobs=[
            PromptChunkLogprobs(chunk.slot, chunk.first_position, _columns_from_proto(chunk.columns))
            for chunk in msg.prompt_logprobs
        ],
        failures=[SlotFailure(failure.slot, failure.error.message) for failure in msg.failures],
        ran_out_of_memory=any(failure.error.code == OverloadedError.grpc_code for failure in msg.failures),
        forward_ns=msg.forward_ns,
        sample_ns=msg.sample_ns,
        gap_ns=msg.gap_ns,
    )


def capacity_from_hello(hello: worker_pb2.WorkerHello) -> WorkerCapacity:
    """What an attaching worker can hold.

    Raises:
        InvalidRequestError: a number is missing, or the worker is part of a group.
    """
    for name in ("num_blocks", "block_size", "num_slots", "max_model_len", "vocab_size", "max_step_tokens"):
        if getattr(hello, name) < 1:
            raise InvalidRequestError(f"the worker announced no {name}", field=f"hello.{name}")
    if hello.world_size > 1:
        raise InvalidRequestError(
            f"the worker is one of a group of {hello.world_size}, and groups are not served yet",
            field="hello.world_size",
        )
    return WorkerCapacity(
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        num_slots=hello.num_slots,
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        max_step_tokens=hello.max_step_tokens,
        kv_bytes_per_token=hello.kv_bytes_per_token,
        shares_prefixes=not hello.kv_depends_on_prompt_length,
    )


# Router and scheduler.


def request_from_proto(msg: scheduler_pb2.Submit, owner: Hashable, arrival_unix_ns: int) -> NewRequest:
    """A request from its message; the core checks that it can run."""
    return NewRequest(
        handle=msg.handle,
        token_ids=list(msg.token_ids),
        params=sampling_params.from_proto(msg.sampling),
        eos_token_ids=list(msg.eos_token_ids),
        owner=owner,
        request_id=msg.request_id,
        priority=msg.priority,
        deadline_unix_ns=msg.deadline_unix_ns,
        cache_salt=msg.cache_salt,
        delivered={d.index: DeliveredTokens(list(d.token_ids), d.finished) for d in msg.delivered},
        traceparent=msg.traceparent,
        arrival_unix_ns=arrival_unix_ns,
    )


def output_to_proto(output: OwnerOutput, step: int) -> scheduler_pb2.SchedulerMessage:
    """One message with all that an owner has to learn."""
    message = scheduler_pb2.StepOutput(
        step=step,
        handles=output.handles,
        indexes=output.indexes,
        counts=[1] * len(output.handles),
        token_ids=output.token_ids,
    )
    for run, columns in output.logprobs.items():
        message.logprobs.add(run=run, columns=_columns_to_proto(columns))
    for finished in output.finished:
        message.finished.append(_finished_to_proto(finished))
    for failure in output.failures:
        message.errors.add(handle=failure.handle, error=error_to_proto(failure.error))
    for handle, columns in output.prompt_logprobs:
        message.prompt_logprobs.add(handle=handle, columns=_columns_to_proto(columns))
    return scheduler_pb2.SchedulerMessage(output=message)


def _finished_to_proto(finished: FinishedSequence) -> scheduler_pb2.Finished:
    message = scheduler_pb2.Finished(
        handle=finished.handle,
        index=finished.index,
        reason=int(finished.reason),  # type: ignore[arg-type]
        stop_token_id=finished.stop_token_id,
        request_finished=finished.request_finished,
    )
    if finished.usage is not None:
        message.usage.prompt_tokens = finished.usage.prompt_tokens
        message.usage.cached_tokens = finished.usage.cached_tokens
        message.usage.completion_tokens = finished.usage.completion_tokens
    if finished.timings is not None:
        message.timings.arrival_unix_ns = finished.timings.arrival_unix_ns
        message.timings.scheduled_unix_ns = finished.timings.scheduled_unix_ns
        message.timings.first_token_unix_ns = finished.timings.first_token_unix_ns
        message.timings.finished_unix_ns = finished.timings.finished_unix_ns
    return message


def hello_to_proto(
    scheduler_id: str, workers: Sequence[worker_pb2.WorkerHello], *, ready: bool, draining: bool
) -> scheduler_pb2.SchedulerHello:
    """What a scheduler with these workers serves; a request must fit any of them."""
    hello = scheduler_pb2.SchedulerHello(
        scheduler_id=scheduler_id, version=package_version(), ready=ready, draining=draining
    )
    if workers:
        hello.model = workers[0].model
        hello.model_fingerprint = workers[0].model_fingerprint
        hello.vocab_size = workers[0].vocab_size
        hello.block_size = workers[0].block_size
        hello.max_model_len = min(w.max_model_len for w in workers)
        hello.kv_capacity_tokens = min(w.num_blocks * w.block_size for w in workers)
    return hello


def load_to_proto(totals: CoreTotals, added: list[int], evicted: list[int]) -> scheduler_pb2.LoadReport:
    """How busy the workers are, with prefix keys that came and went."""
    return scheduler_pb2.LoadReport(
        running=totals.running,
        waiting=totals.waiting,
        free_blocks=totals.blocks_total - totals.blocks_used,
        total_blocks=totals.blocks_total,
        workers=totals.workers,
        preemptions=totals.preemptions,
        prefix_hashes_added=added,
        prefix_hashes_evicted=evicted,
    )


def error_to_proto(error: PagemillError) -> common_pb2.Error:
    """An in-band error."""
    return common_pb2.Error(
        code=error.grpc_code, message=error.message, field=error.field, retry_after_ms=error.retry_after_ms
    )


def _columns_from_proto(msg: common_pb2.LogprobColumns) -> TokenLogprobs:
    return TokenLogprobs(list(msg.chosen), list(msg.ranks), msg.num_top, list(msg.top_ids), list(msg.top_logprobs))


def _columns_to_proto(columns: TokenLogprobs) -> common_pb2.LogprobColumns:
    return common_pb2.LogprobColumns(
        chosen=columns.chosen,
        ranks=columns.ranks,
        num_top=columns.num_top,
        top_ids=columns.top_ids,
        top_logprobs=columns.top_logprobs,
    )
