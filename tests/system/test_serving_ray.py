"""The recipe that serves a plan with Ray Serve: its options, its health, and what it answers."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.serve.context
from starlette.requests import Request

from tests.lib import ROOT
from tests.lib.colocation_plans import Script, artifact, inputs, plan_of
from tests.lib.engines import (  # noqa: F401  fixtures
    TWO,
    WAIT_SECS,
    engine_of,
    result,
    root,
    same,
    script,
)
from tests.lib.inference_requests import RECIPES, binary, outputs_of
from tests.lib.ray_processes import clean_environment
from tests.lib.waiting import until
from tunerd.artifacts.loading import load
from tunerd.colocation import Engine, MemberError, RefusedError
from tunerd.errors import InfrastructureError
from tunerd.vocabulary import Arrays

sys.path.insert(0, str(RECIPES))
import ray_serve_app

# Ray awaits it, once; when a replica without Ray is forgotten, Python calls it.
pytestmark = pytest.mark.filterwarnings("ignore:coroutine 'Members.__del__' was never awaited")
MEMBERS = {"first": {"share": 50}, "second": {"share": 50, "tenants": ["shop", "press"]}}


# --- what Ray is asked for ---------------------------------------------------------------------


def test_a_replica_takes_a_gpu_and_holds_so_many_requests() -> None:
    settings = ray_serve_app.Settings(plan="plan.yaml", replicas=3, in_flight=8)
    deployment = ray_serve_app.deployment_of(settings)
    assert deployment.ray_actor_options["num_gpus"] == 1
    assert deployment.num_replicas == 3
    assert deployment.max_ongoing_requests == 8


def test_a_replica_takes_a_part_of_a_gpu_where_several_have_one() -> None:
    settings = ray_serve_app.Settings(plan="plan.yaml", gpus=0.5)
    assert ray_serve_app.deployment_of(settings).ray_actor_options["num_gpus"] == 0.5


def test_a_replica_of_a_plan_for_cores_takes_no_gpu() -> None:
    options = ray_serve_app.deployment_of(
        ray_serve_app.Settings(plan="plan.yaml", gpus=0)
    ).ray_actor_options
    assert not options.get("num_gpus")
    assert options["num_cpus"] == 1


def test_the_words_of_a_command_are_made_settings() -> None:
    (parameter,) = inspect.signature(ray_serve_app.build).parameters.values()
    assert parameter.annotation is ray_serve_app.Settings  # which Ray asks for just so
    settings = ray_serve_app.Settings.model_validate({"plan": "plan.yaml", "gpus": "0"})
    assert settings == ray_serve_app.Settings(plan="plan.yaml", gpus=0)


# --- one replica, without Ray ------------------------------------------------------------------


@contextlib.contextmanager
def replica_of(engine: Engine) -> Iterator[Any]:
    """Make a replica as Ray does, of an engine that a test looks into."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_serve_app, "Engine", lambda _: engine)
        replica = ray_serve_app.Members.func_or_class("plan.yaml")
    try:
        yield replica
    finally:
        engine.close()


def request(name: str, given: Arrays) -> Request:
    return request_at(f"/v2/models/{name}/infer", given)


def request_at(path: str, given: Arrays, *, root_path: str = "") -> Request:
    body, headers = binary(given)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    raw = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": root_path + path, "root_path": root_path}
    return Request(scope | {"headers": raw}, receive)


def test_a_replica_is_healthy_until_its_engine_is_closed(script: Script, root: Path) -> None:
    engine = engine_of(script, plan_of(root, TWO))
    with replica_of(engine) as replica:
        replica.check_health()
        engine.close()
        with pytest.raises(InfrastructureError, match="takes no requests any more"):
            replica.check_health()


def test_a_replica_with_a_model_that_cannot_be_loaded_again_is_not_healthy(
    script: Script, root: Path
) -> None:
    engine = engine_of(script, plan_of(root, TWO))
    with replica_of(engine) as replica:
        script.faults["artifact-0"] = ["illegal address"]
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), MemberError)
        result(engine.submit("one", inputs()))
        replica.check_health()  # it was loaded again
        script.refuse_loading = {"artifact-0"}
        script.faults["artifact-0"] = ["illegal address"]
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), MemberError)
        assert isinstance(engine.submit("one", inputs()).exception(WAIT_SECS), RefusedError)
        with pytest.raises(InfrastructureError, match=r"one is down: .*is not to be loaded"):
            replica.check_health()
        result(engine.submit("two", inputs()))  # until Ray stops it


async def ask_with_id(replica: Any, model_id: str, request: Request) -> Any:
    """Ask as Ray does for a request with that header."""
    context = ray.serve.context._RequestContext(multiplexed_model_id=model_id)
    ray.serve.context._serve_request_context.set(context)  # of this task alone
    return await replica(request)


@pytest.mark.parametrize(
    ("path", "root_path", "model_id", "nth"),
    [
        ("/", "", "two", 1),
        ("/", "/members", "two", 1),
        ("", "/members", "one", 0),
        ("/v2/models/one/infer", "/members", "", 0),
        ("/v2/models/one/infer", "", "two", 0),  # what the path says
    ],
)
def test_the_path_names_the_model_or_the_multiplexed_id_does(
    script: Script, root: Path, path: str, root_path: str, model_id: str, nth: int
) -> None:
    asked = request_at(path, inputs(), root_path=root_path)
    with replica_of(engine_of(script, plan_of(root, TWO))) as replica:
        answer = asyncio.run(ask_with_id(replica, model_id, asked))
    assert answer.status_code == 200, answer.body
    expected = load(artifact(root, nth))(inputs())
    assert same(outputs_of(answer.body, answer.headers), expected)


@pytest.mark.parametrize(
    ("path", "model_id", "status", "why"),
    [
        ("/", "", 404, b"the header serve_multiplexed_model_id"),
        ("/v2/models/one", "one", 404, b"POST /v2/models/NAME/infer"),
        ("/", "nobody", 400, b"nobody"),
    ],
)
def test_a_request_that_names_no_model_is_told_how_to(
    script: Script, root: Path, path: str, model_id: str, status: int, why: bytes
) -> None:
    with replica_of(engine_of(script, plan_of(root, TWO))) as replica:
        answer = asyncio.run(ask_with_id(replica, model_id, request_at(path, inputs())))
    assert answer.status_code == status
    assert why in answer.body


def test_a_replica_that_is_stopped_answers_what_it_has_taken(script: Script, root: Path) -> None:
    engine = engine_of(script, plan_of(root, TWO))
    asked = [(name, seed) for seed in range(10) for name in TWO]

    async def stop_while_asked(replica: Any) -> tuple[list[Any], Any]:
        gate, entered = script.hold(artifact(root, 0))
        answers = [asyncio.create_task(replica(request(n, inputs(seed)))) for n, seed in asked]
        assert await asyncio.to_thread(entered.wait, WAIT_SECS)
        stopped = asyncio.create_task(replica.__del__())
        await asyncio.to_thread(until, lambda: not engine.is_open)
        late = await replica(request("two", inputs()))
        assert not stopped.done()
        gate.set()
        await stopped
        return await asyncio.gather(*answers), late

    with replica_of(engine) as replica:
        answers, late = asyncio.run(stop_while_asked(replica))
    models = {name: load(artifact(root, nth)) for nth, name in enumerate(TWO)}
    for (name, seed), answer in zip(asked, answers, strict=True):
        assert answer.status_code == 200, answer.body
        assert same(outputs_of(answer.body, answer.headers), models[name](inputs(seed)))
    assert late.status_code == 503
    assert b"takes no requests any more" in late.body


# --- metrics, without Ray ----------------------------------------------------------------------


class Recorded:
    """Stands in for the metrics of Ray Serve, and adds up what they are told."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}

    def metric(self, name: str, _: str, tag_keys: Any = (), boundaries: Any = ()) -> Any:
        values = self.values

        class Metric:
            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0
                self.set(values.get((name, *tags.values()), 0) + value, tags)

            def set(self, value: float, tags: dict[str, str]) -> None:
                assert tuple(tags) == tuple(tag_keys)
                values[name, *tags.values()] = value

            def observe(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0
                self.inc(1, tags)

        return Metric()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_serve_app.metrics, kind, made.metric)
    return made


def test_a_health_check_tells_what_has_happened_since_the_one_before(
    script: Script, root: Path, recorded: Recorded
) -> None:
    engine = engine_of(script, plan_of(root, TWO))

    async def ask(replica: Any, *names: str) -> list[int]:
        return [(await replica(request(name, inputs()))).status_code for name in names]

    with replica_of(engine) as replica:
        assert asyncio.run(ask(replica, "one", "two", "two")) == [200] * 3
        replica.check_health()
        script.faults["artifact-0"] = ["illegal address"]
        assert asyncio.run(ask(replica, "one", "two", "nobody")) == [500, 200, 400]
        replica.check_health()
        replica.check_health()  # nothing has happened, and nothing is counted twice
        planned = {name: member.planned_bytes for name, member in engine.stats().members.items()}
    assert recorded.values == {
        ("tunerd_requests_total", "one", "completed"): 1,
        ("tunerd_requests_total", "one", "failed"): 1,
        ("tunerd_requests_total", "two", "completed"): 3,
        ("tunerd_request_seconds", "one"): 1,
        ("tunerd_request_seconds", "two"): 3,
        ("tunerd_planned_bytes", "one"): planned["one"],
        ("tunerd_planned_bytes", "two"): planned["two"],
        ("tunerd_faults_total",): 1,
    }


# --- replicas of Ray ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of slices of cores that Ray served: under load, and when replicas ended."""
    folder = tmp_path_factory.mktemp("ray")
    plan_of(root, MEMBERS, kind="space").write(folder / "plan.yaml")
    with contextlib.ExitStack() as stack:
        free = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [str(each.getsockname()[1]) for each in free]
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path != str(RECIPES)),
        "RAY_metrics_report_interval_ms": "2000",
        # A proxy that is not ready after three times five seconds is killed, as on busy cores.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.lib.served_by_ray", folder / "plan.yaml", folder, *ports],
        cwd=ROOT,
        env=clean_environment() | environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return said


@pytest.mark.slow
@pytest.mark.parametrize("way", ["handle", "http", "header"])
def test_many_callers_have_the_answers_of_their_own(
    served: dict[str, Any], way: str, record_property: Callable[[str, object], None]
) -> None:
    load = served["loads"][way]
    assert load["right"] == {"first": 100, "second": 100}
    for name in ("p50_ms", "p99_ms", "in_time_pct"):  # nothing holds of them on busy cores
        record_property(name, load[name])
    print(f"by {way}: {load}")


@pytest.mark.slow
def test_a_request_that_is_wrong_is_answered_with_its_status(served: dict[str, Any]) -> None:
    assert served["statuses"] == [400, 404]


@pytest.mark.slow
def test_prometheus_is_told_of_every_request_of_all_replicas(served: dict[str, Any]) -> None:
    assert served["requests"] == {"first completed": 300, "second completed": 300}
    assert served["seconds"] == {"first": 300, "second": 300}
    assert served["replicas"] == 2


@pytest.mark.slow
def test_a_replica_is_killed_and_the_other_serves_on(served: dict[str, Any]) -> None:
    assert served["other_survived"]


@pytest.mark.slow
def test_a_replica_that_ray_stops_answers_what_it_has_taken(served: dict[str, Any]) -> None:
    assert served["drained"] == {"runners": 2, "waited": 8, "right": 8}
