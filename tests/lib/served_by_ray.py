"""Serve a plan with two replicas of Ray Serve, kill one and ask on: arguments PLAN PORT.

Each call of the ray of this process is answered by either of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import httpx
import numpy as np
import psutil
import ray
import ray_serve_app
from ray import serve

from tests.lib.colocation_plans import inputs
from tunerd.artifacts.loading import load
from tunerd.colocation import Plan

PORT = int(sys.argv[2])


def main() -> None:
    plan = Plan.read(sys.argv[1])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    app = ray_serve_app.build(ray_serve_app.Settings(plan=sys.argv[1], replicas=2, gpus=0))
    handle = serve.run(app)
    expected = {m.name: load(m.artifact)(inputs(1)) for m in plan.members}
    ask_both(handle, expected)
    killed, other = replicas()
    os.kill(killed.pid, signal.SIGKILL)
    while len(now := replicas()) < 2 or killed in now:
        with contextlib.suppress(Exception):  # what was under way at the killed one
            ask_both(handle, expected)
        time.sleep(0.2)
    assert other in now
    ask_both(handle, expected)
    serve.shutdown()
    ray.shutdown()
    print("served again")


def replicas() -> list[psutil.Process]:
    """Return the processes of replicas, which Ray names after their class."""
    named = [p for p in psutil.process_iter(["name"]) if "Members" in (p.info["name"] or "")]
    return [p for p in named if os.getpid() in [parent.pid for parent in p.parents()]]


def ask_both(handle, expected) -> None:  # type: ignore[no-untyped-def]
    for name, outputs in expected.items():
        chosen = handle.options(multiplexed_model_id=name)
        found = chosen.infer.remote(inputs(1)).result(timeout_s=60)
        for output, array in outputs.items():
            np.testing.assert_array_equal(found[output], array)
    document = {
        "inputs": [
            {"name": n, "shape": list(a.shape), "datatype": "FP32", "data": a.ravel().tolist()}
            for n, a in inputs(1).items()
        ]
    }
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
        for name, outputs in expected.items():
            answer = http.post(f"/v2/models/{name}/infer", json=document).json()
            for output in answer["outputs"]:
                values = np.array(output["data"], "float32").reshape(output["shape"])
                np.testing.assert_array_equal(values, outputs[output["name"]])
        assert http.post("/v2/models/nobody/infer", json=document).status_code == 400
        assert http.get("/nothing").status_code == 404


if __name__ == "__main__":
    main()
