"""Health, metrics and version: what operators and orchestrators ask."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from pagemill import __version__
from router.http.errors import json_response
from router.pipeline import Pipeline


class HealthRoutes:
    """Liveness never fails while the process answers; readiness says what is missing.

    These routes need no key, so they name what is missing but no address and no load.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def live(self, request: Request) -> Response:
        """200 while the event loop runs: a restart would help nothing else."""
        return json_response({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """200 when requests can be served, else 503 with the reasons; 503 too while draining."""
        status = self._pipeline.status()
        draining, missing = bool(status.get("draining")), list(status.get("missing", ()))
        ready = bool(status.get("ready")) and not draining
        word = "draining" if draining else "ready" if ready else "not ready"
        answer: dict[str, Any] = {"status": word, "missing": missing, "degraded": list(status.get("degraded", ()))}
        return json_response(answer, 200 if ready else 503)


class OperatorRoutes:
    """Metrics and version; they need the key where one is set."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def metrics(self, request: Request) -> Response:
        """All metrics of this process in the Prometheus text format."""
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        """The version of the server."""
        return json_response({"version": __version__})
