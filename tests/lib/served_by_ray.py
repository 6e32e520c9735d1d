"""Serve a plan with two replicas of Ray Serve, and write what became of it to FOLDER/said.json.

Arguments: PLAN FOLDER PORT METRICS_PORT. Many ask at once by the handle and by HTTP, where the
path or a header names the model; Prometheus' port is read; one replica is killed; and another
plan's is stopped while it has requests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from tests.lib.colocation_plans import inputs
from tests.lib.engines import same
from tests.lib.inference_requests import RECIPES, binary, outputs_of
from tests.lib.waiting import until
from tunerd.artifacts.loading import load
from tunerd.colocation import Plan
from tunerd.vocabulary import Arrays

import ray_serve_app  # isort: skip

PORT, METRICS_PORT = int(sys.argv[3]), int(sys.argv[4])
CALLERS, ROUNDS = 8, 25  # of each way to ask
OBJECTIVE_SECS = 0.1  # of which is said how many answers met it

Expected = dict[tuple[str, int], Arrays]
Ask = Callable[[str, int], Arrays]


def main() -> None:
    path, folder = Path(sys.argv[1]), Path(sys.argv[2])
    plan = Plan.read(path)
    models = {m.name: load(m.artifact) for m in plan.members}
    expected = {
        (name, seed): model(inputs(seed)) for name, model in models.items() for seed in range(4)
    }
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        runtime_env={"working_dir": str(RECIPES)},  # as the recipe's command says
        _metrics_export_port=METRICS_PORT,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    handle = serve.run(app_of(path, replicas=2))
    ask = by_handle(handle)
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
        said: dict[str, Any] = {"statuses": wrong_ones(http)}
        said["loads"] = {
            "handle": under_load(ask, expected),
            "http": under_load(by_http(http), expected),
            "header": under_load(by_header(http), expected),
        }
    asked = len(said["loads"]) * CALLERS * ROUNDS
    until(lambda: sum(scraped("ray_tunerd_requests_total", "replica").values()) >= asked)
    said["requests"] = scraped("ray_tunerd_requests_total", "model", "outcome")
    said["seconds"] = scraped("ray_tunerd_request_seconds_count", "model")
    said["replicas"] = len(scraped("ray_tunerd_requests_total", "replica"))
    # Ray forgets a gauge that was not set in the last two of its reports.
    until(lambda: len(scraped("ray_tunerd_planned_bytes", "model", "replica")) == 4)
    said["other_survived"] = killed(ask, expected)
    serve.delete("default")
    stopped = folder / "stopped.yaml"
    patient = [m.model_copy(update={"limit_ms": 120_000}) for m in plan.members]
    update = {"place": "processes", "members": patient}
    plan.model_copy(update=update).write(stopped)
    said["drained"] = drained(stopped, path, expected)
    serve.shutdown()
    ray.shutdown()
    (folder / "said.json").write_text(json.dumps(said))


def app_of(plan: Path, *, replicas: int) -> serve.Application:
    settings = ray_serve_app.Settings(plan=str(plan), replicas=replicas, gpus=0)
    return ray_serve_app.build(settings)


def by_handle(handle: Any) -> Ask:
    def ask(name: str, seed: int) -> Arrays:
        chosen = handle.options(multiplexed_model_id=name)
        found: Arrays = chosen.infer.remote(inputs(seed)).result(timeout_s=60)
        return found

    return ask


def by_http(http: httpx.Client) -> Ask:
    return lambda name, seed: posted(http, f"/v2/models/{name}/infer", seed, {})


def by_header(http: httpx.Client) -> Ask:
    return lambda name, seed: posted(http, "/", seed, {"serve_multiplexed_model_id": name})


def posted(http: httpx.Client, path: str, seed: int, more: dict[str, str]) -> Arrays:
    body, headers = binary(inputs(seed))
    answer = http.post(path, content=body, headers=headers | more)
    assert answer.status_code == 200, answer.text
    return outputs_of(answer.content, answer.headers)


def wrong_ones(http: httpx.Client) -> list[int]:
    body, headers = binary(inputs())
    wrong = http.post("/v2/models/nobody/infer", content=body, headers=headers)
    return [wrong.status_code, http.get("/nothing").status_code]


def under_load(ask: Ask, expected: Expected) -> dict[str, Any]:
    """Have a caller for each answer ask again and again, all at once; count the right answers."""
    secs: list[float] = []
    begin = threading.Barrier(CALLERS)

    def call(name: str, seed: int) -> int:
        right = 0
        begin.wait()
        for _ in range(ROUNDS):
            since = time.monotonic()
            found = ask(name, seed)
            secs.append(time.monotonic() - since)
            right += same(found, expected[name, seed])
        return right

    assert len(expected) == CALLERS
    with ThreadPoolExecutor(CALLERS) as callers:
        calls = [(name, callers.submit(call, name, seed)) for name, seed in expected]
    right: dict[str, int] = {}
    for name, of in calls:
        right[name] = right.get(name, 0) + of.result()
    return {
        "right": right,
        "p50_ms": round(1e3 * float(np.percentile(secs, 50)), 1),
        "p99_ms": round(1e3 * float(np.percentile(secs, 99)), 1),
        "in_time_pct": round(100 * float(np.mean(np.array(secs) <= OBJECTIVE_SECS))),
    }


def scraped(name: str, *labels: str) -> dict[str, float]:
    """Return what Prometheus would be told of a metric, summed by some of its labels."""
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=30).text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                key = " ".join(sample.labels[label] for label in labels)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def killed(ask: Ask, expected: Expected) -> bool:
    """Kill one replica and ask until there are two again; say whether the other lived on."""
    victim, other = replicas()
    os.kill(victim.pid, signal.SIGKILL)
    while len(now := replicas()) < 2 or victim in now:
        with contextlib.suppress(Exception):  # what was under way at the killed one
            assert all(same(ask(*key), outputs) for key, outputs in expected.items())
        time.sleep(0.2)
    assert all(same(ask(*key), outputs) for key, outputs in expected.items())
    return other in now


def drained(plan: Path, after: Path, expected: Expected) -> dict[str, Any]:
    """Deploy another plan while requests wait for the runners of this one; say what they got."""
    where = {"name": "stopped", "route_prefix": "/stopped"}
    handle = serve.run(app_of(plan, replicas=1), **where)
    (replica,) = replicas()
    runners = [p for p in replica.children(recursive=True) if "tunerd" in " ".join(p.cmdline())]
    ask = by_handle(handle)
    for key in expected:
        ask(*key)
    for runner in runners:
        runner.suspend()
    try:
        with ThreadPoolExecutor(len(expected) + 1) as callers:
            answers = {key: callers.submit(ask, *key) for key in expected}
            ongoing = "ray_serve_replica_processing_queries"
            until(lambda: scraped(ongoing, "application").get("stopped") == len(expected))
            replaced = callers.submit(serve.run, app_of(after, replicas=1), **where)
            until(lambda: stopping("stopped") == 1)
            waited = sum(not answer.done() for answer in answers.values())
            for runner in runners:
                runner.resume()
            right = sum(same(a.result(), expected[key]) for key, a in answers.items())
            replaced.result()
    finally:
        for runner in runners:
            with contextlib.suppress(psutil.NoSuchProcess):
                runner.resume()
    until(lambda: not replica.is_running())
    assert all(same(ask(*key), outputs) for key, outputs in expected.items())
    return {"runners": len(runners), "waited": waited, "right": right}


def stopping(application: str) -> int:
    (deployment,) = serve.status().applications[application].deployments.values()
    return sum(n for state, n in deployment.replica_states.items() if state == "STOPPING")


def replicas() -> list[psutil.Process]:
    """Return the processes of replicas, which Ray names after their class."""
    named = [p for p in psutil.process_iter(["name"]) if "Members" in (p.info["name"] or "")]
    return [p for p in named if os.getpid() in [parent.pid for parent in p.parents()]]


if __name__ == "__main__":
    main()
