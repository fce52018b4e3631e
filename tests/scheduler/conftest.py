from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from scheduler_deployment import Deployment


@pytest.fixture
async def deploy() -> AsyncIterator[Callable[..., Any]]:
    deployments: list[Deployment] = []

    async def start(**settings: Any) -> Deployment:
        deployment = Deployment(**settings)
        await deployment.process.start()
        deployments.append(deployment)
        return deployment

    yield start
    for deployment in deployments:
        for peer in deployment.peers:
            await peer.close()
        await deployment.process.stop()
