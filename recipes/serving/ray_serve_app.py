"""Serve the models of a plan with Ray Serve: one replica for each GPU, holding one engine.

    pip install 'tunerd[cuda]' 'ray[serve]'
    cd recipes/serving
    serve run --working-dir . ray_serve_app:build plan=/shared/plan.yaml replicas=2

Replicas find this folder by the working directory, and the plan and its artifacts by their whole
paths, on whichever node. A plan for cores needs gpus=0. Requests are those of the Open Inference
Protocol, as `fastapi_app` has them:

    POST /v2/models/NAME/infer

The path names the model. Where there is none, `POST /`, it is chosen by the multiplexed model id,
which Ray Serve (2.60) reads from the header `serve_multiplexed_model_id`. From Python that chooses
it, too, and arrays go as they are:

    handle = serve.get_app_handle("default").options(multiplexed_model_id="detector")
    outputs = await handle.infer.remote({"x": image})

A replica fails its health check when its engine takes nothing any more, or when one of its models
cannot be loaded again, as after a fault that left the GPU's context dead: Ray stops it and starts
another, which loads them all. A replica that Ray stops answers first what it has taken.
A replica is a process, and with `place: in-process` a CUDA context of its own: killed, it takes
nobody along. Where an MPS daemon runs for its GPU it is a client of that, which it warns of, and
takes all other clients along. With `place: mps` it is none: its members are, in processes of their
own, under a guard outside of Ray's process tree.

Metrics go the way of Ray's own, to the agent of each node, which tells Prometheus of all replicas
there: a route /metrics would be answered by any one of them. They are those of `fastapi_app` with
`ray_` before their names, and with the labels `deployment`, `replica` and `application`, as in
`ray_tunerd_requests_total{model="detector", outcome="completed", replica="...", ...}`:

    ray start --head --metrics-export-port=8080

A replica passes on what its engine counts at each health check, and Ray every ten seconds. What has
not happened yet is not there; what a replica counted just before its end may be missing.
"""

# No `annotations` of the future: Ray reads from that of `build` what it is to make of the words of
# `serve run`, and a string tells it nothing.
import asyncio
import time
from typing import Any

import open_inference
from engine_counts import BUCKETS, SECONDS, SECONDS_HELP, counts_of
from pydantic import BaseModel
from ray import serve
from ray.serve import metrics
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tunerd.colocation import Engine
from tunerd.errors import InfrastructureError

DRAIN_SECS = 30.0
_WHERE = "POST /v2/models/NAME/infer, or POST / with the header serve_multiplexed_model_id: NAME"


class Settings(BaseModel):
    """What `serve run` or a config file gives."""

    plan: str
    replicas: int = 1
    gpus: float = 1.0  # of a replica
    in_flight: int = 64  # requests that a replica holds; the others wait at the proxy


@serve.deployment(
    health_check_period_s=2.0,
    health_check_timeout_s=10.0,
    graceful_shutdown_timeout_s=DRAIN_SECS,
)
class Members:
    """The engine of a plan. It is loaded before the replica takes requests."""

    def __init__(self, plan: str) -> None:
        self._engine = Engine(plan).start()
        self._metrics = Metrics(self._engine)

    async def infer(
        self, inputs: Any, deadline_secs: float | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """Run the model of the multiplexed id; arrays by name, as `Engine.submit` takes them."""
        since, name = time.monotonic(), serve.get_multiplexed_model_id()
        outputs = await self._engine.asubmit(
            name, inputs, deadline_secs=deadline_secs, tenant=tenant
        )
        self._metrics.answered(name, time.monotonic() - since)
        return outputs

    async def __call__(self, request: Request) -> Response:
        """Answer POST /v2/models/NAME/infer, or POST / with a multiplexed model id."""
        since, name = time.monotonic(), _model_of(request)
        if not name:
            return JSONResponse({"detail": _WHERE}, 404)
        header = request.headers.get(open_inference.HEADER)
        found = await open_inference.answer(self._engine, name, await request.body(), header)
        if found.status == 200:
            self._metrics.answered(name, time.monotonic() - since)
        return Response(found.body, found.status, found.headers)

    def check_health(self) -> None:
        """Raise where only another replica would serve all models; Ray asks again and again."""
        self._metrics.update()
        if not self._engine.is_open:
            raise InfrastructureError("the engine takes no requests any more")
        if down := self._engine.stats().down:
            raise InfrastructureError("; ".join(down.values()))

    async def __del__(self) -> None:
        """Stop, when Ray has seen the last answer off. What came after that is answered as well."""
        await asyncio.to_thread(self._engine.close, drain_secs=DRAIN_SECS)


def _model_of(request: Request) -> str:
    """Return the name of the model that a request is for, or "" where it names none."""
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    match path.strip("/").split("/"):
        case ["v2", "models", name, "infer"]:
            return name
        case [""]:
            return str(serve.get_multiplexed_model_id())
    return ""


class Metrics:
    """What an engine counts, and how long answers took, as metrics of Ray."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds = metrics.Histogram(
            SECONDS, SECONDS_HELP, boundaries=list(BUCKETS), tag_keys=("model",)
        )
        self._made = {
            count.name: (metrics.Counter if count.only_grows else metrics.Gauge)(
                count.name, count.help, count.labels
            )
            for count in counts_of(engine)
        }
        self._told: dict[tuple[str, ...], float] = {}  # by a metric's name and labels

    def answered(self, model: str, secs: float) -> None:
        self._seconds.observe(secs, {"model": model})

    def update(self) -> None:
        """Tell Ray what has changed since."""
        for count in counts_of(self._engine):
            for labels, value in count.values.items():
                key = (count.name, *labels)
                more = value - self._told.get(key, 0.0)
                tags = dict(zip(count.labels, labels, strict=True))
                if not count.only_grows:
                    self._made[count.name].set(value, tags)
                elif more > 0:  # a counter of Ray takes nothing else
                    self._made[count.name].inc(more, tags)
                self._told[key] = value


def build(settings: Settings) -> serve.Application:
    """Return the application of a plan."""
    return deployment_of(settings).bind(settings.plan)


def deployment_of(settings: Settings) -> serve.Deployment:
    """Return what Ray is asked for: how many replicas, and what each of them takes."""
    options = {"num_gpus": settings.gpus} if settings.gpus else {"num_cpus": 1}
    return Members.options(
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.in_flight,
        ray_actor_options=options,
    )
