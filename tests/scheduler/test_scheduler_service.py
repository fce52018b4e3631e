"""The scheduler over real gRPC: routers and workers come, go, die and misbehave; streams go on."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scheduler_deployment import solo
from scheduler_peers import VOCAB, until

from pagemill.rpc import aio_channel
from pagemill.v1 import common_pb2, scheduler_pb2
from scheduler import app as app_module
from scheduler import session as session_module


async def test_64_streams_finish_and_leave_all_gauges_at_zero(deploy) -> None:
    d = await deploy()
    await d.worker()
    router = await d.router()
    prompts = {h: [h + 1, *range(2, 4 + h % 20)] for h in range(64)}
    for handle, prompt in prompts.items():
        await router.submit(handle, prompt, 10 + handle % 7)
    await router.wait(*prompts)
    for handle, prompt in prompts.items():
        assert router.tokens[handle][0] == solo(prompt, 10 + handle % 7)
        usage = router.finished[handle][0].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 10 + handle % 7)
        timings = router.finished[handle][0].timings
        assert 0 < timings.arrival_unix_ns <= timings.scheduled_unix_ns <= timings.first_token_unix_ns
        assert timings.first_token_unix_ns <= timings.finished_unix_ns
    await d.idle()
    assert d.metric("request_success_total", finished_reason="length") == 64
    assert d.metric("time_to_first_token_seconds_count") == 64
    assert d.metric("inter_token_latency_seconds_count") == sum(9 + handle % 7 for handle in prompts)
    phases = {phase: d.metric(f"request_{phase}_time_seconds_count") for phase in ("queue", "prefill", "decode")}
    assert phases == {"queue": 64, "prefill": 64, "decode": 64}


@pytest.mark.parametrize(("configured", "in_force"), [(2048, 256), (64, 64)])
async def test_a_step_holds_the_smaller_of_both_bounds(deploy, configured: int, in_force: int) -> None:
    d = await deploy(max_num_batched_tokens=configured)
    worker = await d.worker()
    assert worker.capacity.max_step_tokens == 256
    assert worker.attached.max_num_batched_tokens == in_force
    router = await d.router()
    await router.submit(1, [1 + i % 900 for i in range(600)], 1)
    await router.wait(1)
    # Two steps are in flight when the last chunk's result ends the request.
    assert -(-600 // in_force) <= worker.num_results <= -(-600 // in_force) + 1


async def test_a_scheduler_that_becomes_idle_says_so_at_once(deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "TICK_S", 3600.0)
    d = await deploy()
    await d.worker()
    router = await d.router()
    for handle in range(3):
        before = len(router.loads)
        await router.submit(handle, [1, 2, 3])
        await router.wait(handle)
        await until(lambda before=before: len(router.loads) > before, "a report")
        load = router.loads[-1]
        assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)


async def test_routers_and_workers_come_in_any_order(deploy) -> None:
    d = await deploy()
    router = await d.router()
    assert not router.hello.ready and router.hello.max_model_len == 0
    await router.submit(1, [1, 2, 3])
    await until(lambda: d.metric("num_requests_waiting") == 1, "parked")
    await d.worker()
    await router.wait(1)
    assert router.tokens[1][0] == solo([1, 2, 3], 8)
    assert router.hello.ready
    assert (router.hello.model, router.hello.vocab_size, router.hello.kv_capacity_tokens) == ("fake", VOCAB, 1024)


async def test_a_request_waiting_for_a_worker_can_be_aborted_and_expires(deploy) -> None:
    d = await deploy()
    router = await d.router()
    await router.submit(1, [1, 2, 3], n=2)
    await router.submit(2, [1, 2, 3], deadline_unix_ns=1)
    await router.abort(1)
    await router.wait(1, 2)
    assert router.finished[1][0].reason == common_pb2.FINISH_REASON_ABORT
    assert router.errors[2].code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    await d.idle()


async def test_the_queue_of_requests_waiting_for_a_worker_is_bounded(deploy) -> None:
    d = await deploy(max_queued_requests=3)
    router = await d.router()
    for handle in range(4):
        await router.submit(handle, [1, 2])
    await router.wait(3)
    assert router.errors[3].code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert router.errors[3].retry_after_ms > 0


async def test_a_bad_request_is_refused_in_band_and_disturbs_nobody(deploy) -> None:
    d = await deploy()
    await d.worker()
    router = await d.router()
    await router.submit(1, [1, 2, 3], 20)
    await router.submit(2, [1, VOCAB])
    await router.submit(3, list(range(1, 900)) * 3)
    await router.wait(1, 2, 3)
    assert (router.errors[2].code, router.errors[2].field) == (3, "token_ids")
    assert "2697" in router.errors[3].message and "2048" in router.errors[3].message
    assert router.tokens[1][0] == solo([1, 2, 3], 20)


async def test_ab06_a_failed_row_ends_its_request_and_no_other(deploy) -> None:
    d = await deploy()
    worker = await d.worker()
    worker.model.poisoned_tokens = {900}
    router = await d.router()
    worker.gate.clear()
    await router.submit(1, [1, 2, 3], 30)
    await router.submit(2, [4, 900, 5])
    worker.gate.set()
    await router.wait(1, 2)
    assert router.errors[2].code == grpc.StatusCode.INTERNAL.value[0]
    assert router.tokens[1][0] == solo([1, 2, 3], 30)
    await d.idle()


@pytest.mark.parametrize("die_after", [0, 1, 2, 7, 13])
async def test_a_worker_that_dies_loses_and_repeats_no_token(deploy, die_after) -> None:
    d = await deploy()
    first = await d.worker(name="w0")
    router = await d.router()
    first.die_after = die_after
    for handle in range(6):
        await router.submit(handle, [handle + 1, 7, 9, 4, 6], 25, n=2)
    await until(first.task.done, "worker death")
    await until(lambda: not router.hello.ready, "not ready")
    await router.abort(5)
    await d.worker(name="w1")
    await router.wait(*range(6))
    for handle in range(5):
        for index in range(2):
            assert router.tokens[handle][index] == solo([handle + 1, 7, 9, 4, 6], 25, index)
        usage = next(f.usage for f in router.finished[handle].values() if f.request_finished)
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 50)
    await d.idle()


async def test_requests_of_a_lost_worker_go_on_with_another_one_that_is_there(deploy) -> None:
    d = await deploy()
    workers = [await d.worker(name=f"w{i}", step_s=0.002) for i in range(2)]
    router = await d.router()
    for handle in range(12):
        await router.submit(handle, [handle + 1, 7, 9], 40)
    await until(lambda: all(w.num_results > 5 for w in workers), "both workers have work")
    await workers[0].close()
    await router.wait(*range(12))
    for handle in range(12):
        assert router.tokens[handle][0] == solo([handle + 1, 7, 9], 40)
    await d.idle()


async def test_a_draining_worker_hands_its_requests_over(deploy) -> None:
    d = await deploy()
    leaving = await d.worker(name="w0", step_s=0.002)
    router = await d.router()
    await router.submit(1, [1, 2, 3], 60)
    await until(lambda: len(router.tokens.get(1, {}).get(0, [])) > 5, "some tokens")
    staying = await d.worker(name="w1")
    await leaving.leave()
    await router.wait(1)
    assert router.tokens[1][0] == solo([1, 2, 3], 60)
    await asyncio.wait_for(leaving.drained.wait(), 10)
    assert staying.num_results > 0


async def test_a_worker_with_another_model_is_refused(deploy) -> None:
    d = await deploy()
    await d.worker(fingerprint="a")
    other = await d.worker(wait=False, fingerprint="b", name="other")
    await until(other.task.done, "refusal")
    assert other.end.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "other" in other.end.details() and "fingerprint" in other.end.details()


async def test_a_result_of_the_wrong_step_ends_the_stream_and_the_request_goes_on_elsewhere(deploy) -> None:
    d = await deploy()
    worker = await d.worker()
    worker.skip_step = True
    router = await d.router()
    await router.submit(1, [1, 2, 3])
    await until(worker.task.done, "desync")
    assert worker.end.code() is grpc.StatusCode.FAILED_PRECONDITION
    again = await d.worker()
    await router.wait(1)
    assert again.attached.epoch > worker.attached.epoch
    assert router.tokens[1][0] == solo([1, 2, 3], 8)


async def test_a_worker_that_hangs_is_given_up(deploy) -> None:
    d = await deploy(worker_timeout_s=0.3)
    hung = await d.worker()
    hung.gate.clear()
    router = await d.router()
    await router.submit(1, [1, 2, 3])
    await until(lambda: d.metric("workers") == 0, "given up")
    await d.worker()
    await router.wait(1)
    assert router.tokens[1][0] == solo([1, 2, 3], 8)


async def test_a_router_that_hangs_up_frees_its_blocks_and_leaves_others_alone(deploy) -> None:
    d = await deploy()
    worker = await d.worker(step_s=0.001)
    gone, stays = await d.router(), await d.router()
    for handle in range(10):
        await gone.submit(handle, [handle, 5, 6], 500, eos_token_ids=[VOCAB])  # nobody knows how long that gets
    await stays.submit(1, [1, 2, 3], 30)
    await until(lambda: bool(gone.tokens) and bool(stays.tokens), "both run")
    await gone.close()
    await stays.wait(1)
    assert stays.tokens[1][0] == solo([1, 2, 3], 30)
    await d.idle()
    assert worker.num_results < 400
    assert d.metric("request_success_total", finished_reason="abort") == d.metric("requests_aborted_total") == 10


async def test_aborts_end_a_request_or_one_sequence(deploy) -> None:
    d = await deploy()
    await d.worker(step_s=0.001)
    router = await d.router()
    await router.submit(1, [1, 2, 3], 40, n=3)
    await router.submit(2, [1, 2, 3], 400)
    await until(lambda: len(router.tokens.get(1, {})) == 3 and 2 in router.tokens, "all run")
    await router.abort(1, 1)
    await router.abort(2)
    await router.wait(1, 2)
    assert router.finished[1][1].reason == common_pb2.FINISH_REASON_ABORT
    assert router.finished[2][0].reason == common_pb2.FINISH_REASON_ABORT
    for index in (0, 2):
        assert router.tokens[1][index] == solo([1, 2, 3], 40, index)
    await d.idle()


async def test_a_resubmission_goes_on_after_the_delivered_tokens(deploy) -> None:
    d = await deploy()
    await d.worker()
    router = await d.router()
    delivered = [
        scheduler_pb2.DeliveredTokens(index=0, token_ids=solo([1, 2, 3], 5)),
        scheduler_pb2.DeliveredTokens(index=1, token_ids=solo([1, 2, 3], 2, 1), finished=True),
    ]
    await router.submit(1, [1, 2, 3], 12, n=2, delivered=delivered)
    await router.wait(1)
    assert router.tokens[1] == {0: solo([1, 2, 3], 12)[5:]}
    assert router.finished[1][0].usage.completion_tokens == 14


async def test_a_slow_router_gets_merged_output_and_a_stuck_one_is_cut_off(deploy, monkeypatch) -> None:
    d = await deploy()
    await d.worker()
    slow = await d.router()
    slow.reading.clear()
    await slow.submit(1, [1, 2, 3], 800)
    await until(lambda: d.process.dispatcher.num_requests == 0 and d.metric("scheduler_steps_total") >= 800, "done")
    slow.reading.set()
    await slow.wait(1)
    assert slow.tokens[1][0] == solo([1, 2, 3], 800)
    monkeypatch.setattr(session_module, "MAX_PENDING_ITEMS", 0)
    await slow.submit(2, [1, 2, 3])
    await until(slow.task.done, "cut off")
    assert slow.end.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await d.idle()


async def test_load_reports_name_the_cached_prefixes(deploy) -> None:
    d = await deploy()
    await d.worker()
    router = await d.router()
    assert router.loads == [] or router.loads[0].prefix_hashes_reset
    await router.submit(1, list(range(1, 18)))
    await router.wait(1)
    await until(lambda: any(load.prefix_hashes_added for load in router.loads), "keys reported")
    late = await d.router()
    await until(lambda: bool(late.loads), "load report")
    assert late.loads[0].prefix_hashes_reset
    assert set(late.loads[0].prefix_hashes_added) == {k for load in router.loads for k in load.prefix_hashes_added}
    assert late.loads[0].total_blocks == 256 and late.loads[0].workers == 1


async def test_a_drain_finishes_what_runs_and_refuses_what_comes(deploy) -> None:
    d = await deploy()
    worker = await d.worker(step_s=0.002)
    router = await d.router()
    await router.submit(1, [1, 2, 3], 60)
    await until(lambda: bool(router.tokens), "running")
    draining = asyncio.create_task(d.process.drain())
    await until(lambda: router.hello.draining and not router.hello.ready, "announced")
    await router.submit(2, [1, 2, 3])
    await router.wait(1, 2)
    assert router.errors[2].code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert router.tokens[1][0] == solo([1, 2, 3], 60)
    await asyncio.wait_for(draining, 10)
    await d.process.stop()
    assert worker.drained.is_set()
    await until(router.task.done, "session closed")
    assert router.end.code() is grpc.StatusCode.UNAVAILABLE


async def test_health_and_reflection_answer(deploy) -> None:
    d = await deploy()
    async with aio_channel(d.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status() -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="pagemill.v1.Scheduler"))
            return answer.status

        give_up = asyncio.get_running_loop().time() + 10
        while await status() != health_pb2.HealthCheckResponse.SERVING:
            assert asyncio.get_running_loop().time() < give_up
            await asyncio.sleep(0.01)


async def test_prompt_logprobs_and_trace_links_cross_the_wire(deploy) -> None:
    d = await deploy()
    worker = await d.worker()
    router = await d.router()
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await router.submit(1, [1, 2, 3, 4], traceparent=traceparent, sampling={"prompt_logprobs": 0})
    await router.wait(1)
    assert router.prompt_logprobs[1] == [-2.0, -3.0, -4.0]
    assert traceparent in worker.trace_links


async def test_a_request_does_not_go_on_with_another_model(deploy) -> None:
    d = await deploy()
    first = await d.worker(fingerprint="a", step_s=0.002)
    router = await d.router()
    await router.submit(1, [1, 2, 3], 100)
    await until(lambda: bool(router.tokens), "running")
    await first.close()
    await until(lambda: d.metric("workers") == 0, "worker gone")
    await router.submit(2, [1, 2, 3])
    await until(lambda: d.metric("num_requests_waiting") == 2, "both wait")
    await d.worker(fingerprint="b", name="w1")
    await router.wait(1, 2)
    assert router.errors[1].code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert router.tokens[2][0] == solo([1, 2, 3], 8)
    await d.idle()
