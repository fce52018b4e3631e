"""The worker's only translation between protobuf and the plain records of `pagemill.step`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from pagemill import sampling_params
from pagemill.errors import NumericalError, OverloadedError
from pagemill.step import NewSequence, SlotSampling, StepPlan, StepResult, TokenLogprobs, WorkerCapacity
from pagemill.v1 import common_pb2, worker_pb2


def plan_from_proto(msg: worker_pb2.Step) -> StepPlan:
    """A plan from its message; nothing is checked beyond what protobuf guarantees."""
    return StepPlan(
        epoch=msg.epoch,
        step=msg.step,
        released_slots=list(msg.released_slots),
        new_sequences=[_sequence_from_proto(sequence) for sequence in msg.new_sequences],
        slots=list(msg.slots),
        num_tokens=list(msg.num_tokens),
        sample=list(msg.sample),
        new_block_counts=list(msg.new_block_counts),
        new_block_ids=list(msg.new_block_ids),
        copy_sources=list(msg.copy_sources),
        copy_destinations=list(msg.copy_destinations),
        trace_links=list(msg.trace_links),
    )


def _sequence_from_proto(msg: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        slot=msg.slot,
        token_ids=list(msg.token_ids),
        num_prompt_tokens=msg.num_prompt_tokens,
        num_computed_tokens=msg.num_computed_tokens,
        block_ids=list(msg.block_ids),
        sampling=_sampling_from_proto(msg),
    )


def _sampling_from_proto(msg: worker_pb2.NewSequence) -> SlotSampling:
    params = sampling_params.from_proto(msg.sampling)
    return SlotSampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed or 0,
        min_tokens=params.min_tokens,
        masked_until_min_tokens=list(msg.masked_until_min_tokens),
        logit_bias=dict(params.logit_bias),
        num_logprobs=-1 if params.logprobs is None else params.logprobs,
        num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
    )


def _columns_to_proto(logprobs: TokenLogprobs) -> common_pb2.LogprobColumns:
    return common_pb2.LogprobColumns(
        chosen=logprobs.chosen,
        ranks=logprobs.ranks,
        num_top=logprobs.num_top,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def result_to_proto(result: StepResult) -> worker_pb2.WorkerMessage:
    """The message that carries a result up."""
    code = OverloadedError.grpc_code if result.ran_out_of_memory else NumericalError.grpc_code
    return worker_pb2.WorkerMessage(
        result=worker_pb2.StepResult(
            epoch=result.epoch,
            step=result.step,
            sampled_token_ids=result.sampled_token_ids,
            logprobs=[
                worker_pb2.SampleLogprobs(position=position, columns=_columns_to_proto(logprobs))
                for position, logprobs in result.logprobs.items()
            ],
            prompt_logprobs=[
                worker_pb2.ChunkLogprobs(
                    slot=chunk.slot, first_position=chunk.first_position, columns=_columns_to_proto(chunk.logprobs)
                )
                for chunk in result.prompt_logprobs
            ],
            failures=[
                worker_pb2.SlotFailure(
                    slot=failure.slot,
                    error=common_pb2.Error(code=code, message=failure.message),
                )
                for failure in result.failures
            ],
            forward_ns=result.forward_ns,
            sample_ns=result.sample_ns,
            gap_ns=result.gap_ns,
        )
    )


def hello_to_proto(
    capacity: WorkerCapacity, *, worker_id: str, model: str, fingerprint: str, device: str
) -> worker_pb2.WorkerMessage:
    """The first message of a stream."""
    return worker_pb2.WorkerMessage(
        hello=worker_pb2.WorkerHello(
            worker_id=worker_id,
            version=_package_version(),
            model=model,
            model_fingerprint=fingerprint,
            group=worker_id,
            rank=0,
            world_size=1,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            num_slots=capacity.num_slots,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            max_step_tokens=capacity.max_step_tokens,
            device=device,
            kv_bytes_per_token=capacity.kv_bytes_per_token,
            kv_depends_on_prompt_length=not capacity.shares_prefixes,
        )
    )


def draining_to_proto(reason: str) -> worker_pb2.WorkerMessage:
    """Tells the scheduler to send no further step."""
    return worker_pb2.WorkerMessage(draining=worker_pb2.WorkerDraining(reason=reason))


def _package_version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0.0.0"


def default_worker_id(process_id: int) -> str:
    """Name of this worker process, for logs and metrics."""
    return f"{platform.node() or 'worker'}-{process_id}"
