"""The recipe that serves a plan over HTTP: answers, errors, deadlines, metrics and a load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.lib.colocation_plans import artifact, inputs, plan_of
from tests.lib.engines import same
from tests.lib.inference_requests import RECIPES, binary, document, outputs_of
from tunerd.artifacts.loading import load
from tunerd.colocation import Engine, Plan

sys.path.insert(0, str(RECIPES))
import fastapi_app

MEMBERS: dict[str, dict[str, Any]] = {"first": {}, "second": {"tenants": ["shop", "press"]}}
SLICES = {name: {"share": 50} | more for name, more in MEMBERS.items()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@contextlib.contextmanager
def served(plan: Plan) -> Iterator[str]:
    """Serve a plan as uvicorn does on a command line, and yield the address."""
    config = uvicorn.Config(fastapi_app.create_app(plan), port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[httpx.Client]:
    with (
        served(plan_of(root, MEMBERS, kind="time")) as address,
        httpx.Client(base_url=address, timeout=60) as made,
    ):
        yield made


@pytest.mark.parametrize(("nth", "name"), list(enumerate(MEMBERS)))
def test_a_model_answers_in_json_and_in_bytes(
    client: httpx.Client, root: Path, nth: int, name: str
) -> None:
    given, expected = inputs(3), load(artifact(root, nth))(inputs(3))
    answer = client.post(f"/v2/models/{name}/infer", json=document(given))
    assert answer.status_code == 200, answer.text
    assert (answer.json()["model_name"], answer.json()["id"]) == (name, "7")
    assert same(outputs_of(answer.content, answer.headers), expected)
    body, headers = binary(given)
    raw = client.post(f"/v2/models/{name}/infer", content=body, headers=headers)
    assert raw.status_code == 200, raw.text
    assert same(outputs_of(raw.content, raw.headers), expected)


def test_outputs_are_chosen_by_name(client: httpx.Client) -> None:
    said = document(inputs(), outputs=[{"name": "scores"}])
    answer = client.post("/v2/models/first/infer", json=said)
    assert outputs_of(answer.content, answer.headers).keys() == {"scores"}
    said["outputs"] = [{"name": "nothing"}]
    answer = client.post("/v2/models/first/infer", json=said)
    assert answer.status_code == 400
    assert "no output 'nothing'; it has scores, features" in answer.text


def test_a_model_says_what_it_takes(client: httpx.Client) -> None:
    said = client.get("/v2/models/second").json()
    assert said["inputs"][0] == {"name": "x", "datatype": "FP32", "shape": [2, 3, 8, 8]}
    assert client.get("/v2/models/third").status_code == 404
    assert client.post("/v2/models/third/infer", json={}).status_code == 404


def test_a_server_is_ready_until_its_engine_takes_nothing_any_more(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(plan_of(root, MEMBERS, kind="time"))
    monkeypatch.setattr(fastapi_app, "Engine", lambda _: engine)
    with served(engine.plan) as address, httpx.Client(base_url=address, timeout=60) as http:
        for path in ("/v2/health/live", "/v2/health/ready"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()) == (200, {"ready": True})
        engine.drain()
        for path in ("/v2/health/live", "/v2/health/ready"):
            answer = http.get(path)
            assert (answer.status_code, answer.json()) == (503, {"ready": False})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda d: d.pop("inputs"), "no list 'inputs'"),
        (lambda d: d["inputs"].pop(), "takes the inputs x, offset"),
        (lambda d: d["inputs"][0].update(shape=[2, 3, 8, 9]), "for the shape"),
        (lambda d: d["inputs"][0].update(datatype="FP99"), "known datatype"),
        (lambda d: d["inputs"][0].update(datatype="FP64"), "it takes float32"),
        (lambda d: d.update(parameters={"tenant": "nobody"}), "no tenant 'nobody'"),
    ],
)
def test_a_request_that_is_wrong_is_answered_with_what_is_wrong(
    client: httpx.Client, spoil: Any, why: str
) -> None:
    said = document(inputs())
    spoil(said)
    answer = client.post("/v2/models/second/infer", json=said)
    assert answer.status_code == 400
    assert why in answer.json()["detail"]


def test_bytes_that_do_not_fit_are_refused(client: httpx.Client) -> None:
    body, headers = binary(inputs())
    for spoiled, said in ((body[:-1], headers), (body + b"0", headers), (body, {})):
        answer = client.post("/v2/models/first/infer", content=spoiled, headers=said)
        assert answer.status_code == 400, answer.text


def test_many_callers_of_slices_of_cores_have_the_answers_of_their_own(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(plan_of(root, SLICES, kind="space"))
    monkeypatch.setattr(fastapi_app, "Engine", lambda _: engine)
    expected = {
        (name, seed): load(artifact(root, nth))(inputs(seed))
        for nth, name in enumerate(MEMBERS)
        for seed in range(4)
    }

    async def ask(http: httpx.AsyncClient, name: str, seed: int) -> None:
        body, headers = binary(inputs(seed))
        answer = await http.post(f"/v2/models/{name}/infer", content=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert same(outputs_of(answer.content, answer.headers), expected[name, seed])

    async def load_it(address: str) -> str:
        async with httpx.AsyncClient(base_url=address, timeout=60) as http:
            await asyncio.gather(*(ask(http, *key) for _ in range(25) for key in expected))
            return (await http.get("/metrics")).text

    with served(engine.plan) as address:
        metrics = asyncio.run(load_it(address))
    assert len({proof.which for proof in engine.stats().proofs}) == 2  # each its own cores
    assert 'tunerd_requests_total{model="first",outcome="completed"} 100.0' in metrics
    assert 'tunerd_requests_total{model="second",outcome="completed"} 100.0' in metrics
    assert 'tunerd_request_seconds_count{model="second"} 100.0' in metrics
    assert "tunerd_faults_total 0.0" in metrics


def test_a_deadline_that_cannot_be_met_is_answered_before_the_request_waits(root: Path) -> None:
    late = document(inputs(), parameters={"timeout": 1})
    with (
        served(plan_of(root, MEMBERS, kind="regulated")) as address,
        httpx.Client(base_url=address, timeout=60) as http,
    ):
        refused = http.post("/v2/models/first/infer", json=late)
        metrics = http.get("/metrics").text
    assert refused.status_code == 503
    assert "after its deadline" in refused.json()["detail"]
    assert 'tunerd_requests_total{model="first",outcome="refused"} 1.0' in metrics


def test_a_server_that_is_told_to_stop_answers_what_it_has_taken(
    root: Path, tmp_path: Path
) -> None:
    plan_of(root, MEMBERS, kind="time").write(tmp_path / "plan.yaml")
    command = [sys.executable, "-m", "uvicorn", "--app-dir", RECIPES, "fastapi_app:app"]
    environment = os.environ | {"TUNERD_PLAN": str(tmp_path / "plan.yaml")}
    with subprocess.Popen(
        [*command, "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stderr is not None
            line = next(x for x in server.stderr if "running on" in x)
            address = line.split()[line.split().index("on") + 1]
            body, headers = binary(inputs())
            with (
                httpx.Client(base_url=address, timeout=60) as http,
                http.stream(
                    "POST", "/v2/models/first/infer", content=body, headers=headers
                ) as answer,
            ):
                server.terminate()  # while the connection is open
                answer.read()
                assert answer.status_code == 200
        finally:
            server.terminate()
        assert server.wait(60) in (0, -signal.SIGTERM)
