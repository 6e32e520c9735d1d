"""Serve the models of a plan over HTTP, with the Open Inference Protocol and metrics.

    pip install 'tunerd[cuda]' fastapi uvicorn prometheus-client
    TUNERD_PLAN=plan.yaml uvicorn --app-dir recipes/serving fastapi_app:app --workers 1

One worker for each GPU: the engine of a plan owns what it shares. A request waits in the engine,
and the event loop goes on. When the server is told to stop, the requests that it has taken are
answered first.

    POST /v2/models/NAME/infer     GET /v2/models/NAME     GET /v2/health/ready     GET /metrics

A request that cannot be met in time is answered with 503 and why, before it waits; the parameters
`timeout` (microseconds) and `tenant` of a request are its deadline and whose it is. The
server is neither ready nor live, by 503, when the engine takes nothing any more.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import open_inference
from engine_counts import BUCKETS, SECONDS, SECONDS_HELP, counts_of
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tunerd.colocation import Engine, Plan
from tunerd.errors import InputError

DRAIN_SECS = 30.0


def create_app(plan: Plan | Path | str) -> FastAPI:
    """Return the application that serves a plan; its models load when the server starts."""
    engine = Engine(plan)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    latency = Histogram(SECONDS, SECONDS_HELP, ["model"], buckets=BUCKETS, registry=registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(engine.start)
        try:
            yield
        finally:
            await asyncio.to_thread(engine.close, drain_secs=DRAIN_SECS)

    app = FastAPI(title="tunerd", lifespan=lifespan)

    @app.get("/v2/health/live")
    @app.get("/v2/health/ready")
    async def ready(response: Response) -> dict[str, bool]:
        # A server that has not loaded its models takes no connection yet. An engine that has failed
        # takes nothing any more, and only another process helps: so it is not live either.
        if not engine.is_open:
            response.status_code = 503
        return {"ready": engine.is_open}

    @app.get("/v2/models/{name}")
    async def describe(name: str) -> dict[str, object]:
        return {
            "name": name,
            "platform": "tunerd",
            "inputs": [
                {
                    "name": spec.name,
                    "datatype": open_inference.datatype_of(spec.dtype),
                    "shape": list(spec.shape),
                }
                for spec in known(name)
            ],
        }

    @app.post("/v2/models/{name}/infer")
    async def infer(name: str, request: Request) -> Response:
        since = time.monotonic()
        known(name)
        header = request.headers.get(open_inference.HEADER)
        found = await open_inference.answer(engine, name, await request.body(), header)
        if found.status == 200:
            latency.labels(name).observe(time.monotonic() - since)
        return Response(found.body, found.status, found.headers)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    def known(name: str) -> tuple[object, ...]:
        try:
            return engine.inputs_of(name)
        except InputError as error:
            raise HTTPException(404, str(error)) from error

    return app


class EngineCollector(Collector):
    """What an engine counts, in Prometheus' form."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        for count in counts_of(self._engine):
            made = CounterMetricFamily if count.only_grows else GaugeMetricFamily
            family = made(count.name, count.help, labels=count.labels)
            for labels, value in count.values.items():
                family.add_metric(labels, value)
            yield family


def __getattr__(name: str) -> FastAPI:
    if name == "app":  # what uvicorn asks for
        return create_app(os.environ["TUNERD_PLAN"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
