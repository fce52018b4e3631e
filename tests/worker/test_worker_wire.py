"""Protobuf to plan, result to protobuf."""

from __future__ import annotations

from pagemill.step import PromptChunkLogprobs, SlotFailure, StepResult, TokenLogprobs, WorkerCapacity
from pagemill.v1 import common_pb2, worker_pb2
from scheduler.wire import result_from_proto
from worker import wire


def test_plan_survives_the_wire() -> None:
    message = worker_pb2.Step(
        epoch=3,
        step=9,
        released_slots=[4],
        new_sequences=[
            worker_pb2.NewSequence(
                slot=2,
                token_ids=[5, 6, 7],
                num_prompt_tokens=2,
                num_computed_tokens=1,
                block_ids=[8],
                sampling=common_pb2.SamplingParams(
                    temperature=0.5, top_k=-1, seed=2**64 - 1, min_tokens=3, logprobs=0, logit_bias={7: 1.5}
                ),
                masked_until_min_tokens=[2],
            )
        ],
        slots=[2, 0],
        num_tokens=[2, 1],
        sample=[True, True],
        new_block_counts=[0, 1],
        new_block_ids=[11],
        copy_sources=[1],
        copy_destinations=[2],
        trace_links=["00-a-b-01"],
    )
    plan = wire.plan_from_proto(worker_pb2.Step.FromString(message.SerializeToString()))
    assert (plan.epoch, plan.step, plan.released_slots) == (3, 9, [4])
    assert (plan.slots, plan.num_tokens, plan.sample) == ([2, 0], [2, 1], [True, True])
    assert (plan.new_block_counts, plan.new_block_ids) == ([0, 1], [11])
    assert (plan.copy_sources, plan.copy_destinations, plan.trace_links) == ([1], [2], ["00-a-b-01"])
    (sequence,) = plan.new_sequences
    assert (sequence.slot, sequence.token_ids, sequence.num_prompt_tokens) == (2, [5, 6, 7], 2)
    assert (sequence.num_computed_tokens, sequence.block_ids) == (1, [8])
    sampling = sequence.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 0, 1.0, 2**64 - 1)
    assert (sampling.min_tokens, sampling.masked_until_min_tokens) == (3, [2])
    assert sampling.logit_bias == {7: 1.5}
    assert (sampling.num_logprobs, sampling.num_prompt_logprobs) == (0, -1)


def test_result_survives_the_wire() -> None:
    result = StepResult(
        epoch=1,
        step=2,
        sampled_token_ids=[10, 0],
        logprobs={0: TokenLogprobs([-0.5], [1], 2, [10, 11], [-0.5, -1.5])},
        prompt_logprobs=[PromptChunkLogprobs(3, 1, TokenLogprobs([-1.0, -2.0], [4, 5]))],
        failures=[SlotFailure(7, "NaN")],
        forward_ns=5,
        sample_ns=6,
        gap_ns=7,
    )
    message = worker_pb2.WorkerMessage.FromString(wire.result_to_proto(result).SerializeToString()).result
    assert (message.epoch, message.step, list(message.sampled_token_ids)) == (1, 2, [10, 0])
    assert message.logprobs[0].position == 0
    assert list(message.logprobs[0].columns.top_ids) == [10, 11]
    assert list(message.logprobs[0].columns.chosen) == [-0.5]
    assert (message.prompt_logprobs[0].slot, message.prompt_logprobs[0].first_position) == (3, 1)
    assert list(message.prompt_logprobs[0].columns.ranks) == [4, 5]
    assert (message.failures[0].slot, message.failures[0].error.code, message.failures[0].error.message) == (
        7,
        13,
        "NaN",
    )
    assert (message.forward_ns, message.sample_ns, message.gap_ns) == (5, 6, 7)
    assert not result_from_proto(message).ran_out_of_memory


def test_running_out_of_memory_survives_the_wire() -> None:
    result = StepResult(epoch=1, step=2, failures=[SlotFailure(7, "out of memory")], ran_out_of_memory=True)
    message = worker_pb2.WorkerMessage.FromString(wire.result_to_proto(result).SerializeToString()).result
    assert message.failures[0].error.code == 8
    assert result_from_proto(message).ran_out_of_memory


def test_hello_names_the_capacity() -> None:
    capacity = WorkerCapacity(100, 16, 8, 512, 320, 64, 1024)
    hello = wire.hello_to_proto(capacity, worker_id="w", model="m", fingerprint="f", device="cpu").hello
    assert (hello.num_blocks, hello.block_size, hello.num_slots, hello.max_model_len) == (100, 16, 8, 512)
    assert (hello.vocab_size, hello.max_step_tokens, hello.kv_bytes_per_token, hello.world_size) == (320, 64, 1024, 1)
    assert hello.version
