"""Requests beyond what a router wants to run at once are held back, and can be ended there."""

from __future__ import annotations

import asyncio

import grpc
from scheduler_deployment import Deployment, solo
from scheduler_peers import PeerRouter, until

from pagemill.v1 import common_pb2, scheduler_pb2


async def hold_back(router: PeerRouter, max_inflight_requests: int) -> None:
    flow = scheduler_pb2.FlowControl(max_inflight_requests=max_inflight_requests)
    await router.call.write(scheduler_pb2.RouterMessage(flow_control=flow))


async def with_one_held_back(deploy, **held_back: object) -> tuple[Deployment, PeerRouter]:
    """Request 1 runs for long, request 2 waits for it."""
    d = await deploy()
    await d.worker(step_s=0.002)
    router = await d.router()
    await hold_back(router, 1)
    await router.submit(1, [1, 2, 3], 200)
    await router.submit(2, [4, 5, 6], 8, **held_back)
    await until(lambda: d.process.dispatcher.num_requests == 2, "one runs, one waits")
    return d, router


async def test_flow_control_holds_requests_back(deploy) -> None:
    d = await deploy()
    await d.worker(step_s=0.001)
    router = await d.router()
    await hold_back(router, 2)
    most = 0
    for handle in range(6):
        await router.submit(handle, [handle + 1, 2], 10)
    while not all(router.is_over(h) for h in range(6)):
        most = max(most, int(d.metric("num_requests_running")))
        await asyncio.sleep(0.001)
    assert most <= 2
    assert all(router.tokens[h][0] == solo([h + 1, 2], 10) for h in range(6))


async def test_a_request_that_is_held_back_ends_when_it_is_aborted(deploy) -> None:
    d, router = await with_one_held_back(deploy)
    await router.abort(2)
    await router.wait(2)
    assert [f.reason for f in router.finished[2].values()] == [common_pb2.FINISH_REASON_ABORT]
    assert not router.is_over(1)
    await router.wait(1)
    assert router.tokens[1][0] == solo([1, 2, 3], 200)
    await d.idle()


async def test_one_sequence_of_a_request_that_is_held_back_ends_alone(deploy) -> None:
    d, router = await with_one_held_back(deploy, n=2)
    await router.abort(2, 0)
    await until(lambda: 0 in router.finished.get(2, {}), "sequence 0 ended")
    assert not router.is_over(2)
    await router.abort(1)
    await router.wait(1, 2)
    assert router.finished[2][0].reason == common_pb2.FINISH_REASON_ABORT
    assert not router.tokens[2].get(0) and router.tokens[2][1] == solo([4, 5, 6], 8, 1)
    await d.idle()


async def test_a_handle_is_taken_also_while_its_request_is_held_back(deploy) -> None:
    _, router = await with_one_held_back(deploy)
    await router.submit(2, [7, 8, 9], 8)
    await until(router.task.done, "session closed")
    assert router.end.code() is grpc.StatusCode.ALREADY_EXISTS
