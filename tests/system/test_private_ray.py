"""Ray without a name of its own that tunerd uses: a cluster starts all the same, by public API."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.lib.ray_processes import Child, child, living, short_folder
from tunerd.cluster import private_ray
from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import InfrastructureError, ModelError

# A cluster that answers a call, in a Ray that does not have some names.
CLUSTER = """
import json, os, sys
from tunerd.cluster import private_ray
hidden, found = sys.argv[1:], private_ray._found
private_ray._found = lambda module, name: None if name in hidden else found(module, name)
from tunerd.cluster.ray_cluster import Cluster
with Cluster(address=None, run="test", cpus=1, gpus=0) as cluster:
    ray = cluster._ray
    assert ray.get(ray.remote(num_cpus=1)(lambda: 6 * 7).remote()) == 42
    print(json.dumps({"token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
    sys.stdin.read()
"""

USES = {
    "asking for the node often": ("get_node",),
    "what is asked of the node": ("GlobalState", "_get_gcs_client_options"),
    "no agent that serves jobs": ("get_dashboard_dependency_error",),
    "no agents": ("persist_port",),
    "no command of agents": ("_build_python_executable_command_memory_profileable",),
    "no API server": ("Node.start_api_server",),
    "no monitors": ("Node.start_monitor", "Node.start_log_monitor"),
    "reading the token anew": ("Config.initialize", "AuthenticationTokenLoader.instance"),
    "no handler of SIGTERM": ("set_sigterm_handler",),
    "messages kept off stdout": ("print_to_stdstream",),
}


def names(process: Child) -> set[str]:
    return {p.name() for p in process.family()}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_cluster_starts_without_a_private_name_of_ray(use: str) -> None:
    with (
        short_folder() as runtime,
        child(CLUSTER, *USES[use], TUNERD_RUNTIME_FOLDER=str(runtime)) as started,
    ):
        family = started.family()
        assert {"raylet", "gcs_server"} <= names(started)
    assert started.process.returncode == 0
    assert living(family) == []


def test_a_private_cluster_runs_no_agent_of_ray() -> None:
    with (
        short_folder() as runtime,
        child(CLUSTER, TUNERD_RUNTIME_FOLDER=str(runtime)) as started,
    ):
        commands = {p: p.cmdline() for p in started.family()}
        idle = [p for p, c in commands.items() if any(w.endswith("idle_agent.py") for w in c[:4])]
        assert len(idle) == 2
        assert not [c for c in commands.values() if c and re.match("ray::.*Agent", c[0])]
    assert living(idle) == []


def test_a_cluster_starts_and_leaves_nothing_without_any_of_them() -> None:
    hidden = [name for names in USES.values() for name in names]
    with (
        short_folder() as runtime,
        child(CLUSTER, *hidden, TUNERD_RUNTIME_FOLDER=str(runtime)) as started,
    ):
        family = started.family()
        assert {"raylet", "gcs_server"} <= names(started)
    assert started.process.returncode == 0
    assert living(family) == []


def test_a_cluster_starts_where_the_private_functions_of_ray_are_others() -> None:
    other = "private_ray._asked_often = lambda get_node: None\n"  # a TypeError when it is called
    code = CLUSTER.replace("hidden, found", other + "hidden, found")
    with (
        short_folder() as runtime,
        child(code, TUNERD_RUNTIME_FOLDER=str(runtime)) as started,
    ):
        family = started.family()
        assert [p.name() for p in family].count("raylet") == 1
        assert [p.name() for p in family].count("gcs_server") == 1
    assert started.process.returncode == 0
    assert living(family) == []


def test_what_rays_threads_print_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_ray, "_found", lambda *_: None)
    caplog.set_level(logging.INFO, "tunerd.cluster.private_ray")
    results, may_print = io.StringIO(), threading.Event()

    def message() -> None:
        may_print.wait()
        print("a message of the raylet")

    with redirect_stdout(results):
        before = sys.stdout
        with private_ray.messages_logged() as has_started:
            rays = threading.Thread(target=message)
            rays.start()
            has_started()
            may_print.set()
            rays.join()
            print("a result")
        assert sys.stdout is before
    assert results.getvalue() == "a result\n"
    assert "Ray: a message of the raylet" in caplog.messages


def test_a_second_token_is_refused_where_ray_keeps_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(private_ray, "_found", lambda *_: None)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "first")
    private_ray._first_token.cache_clear()
    try:
        private_ray.forget_token()
        private_ray.forget_token()
        monkeypatch.setenv("RAY_AUTH_TOKEN", "second")
        with pytest.raises(InfrastructureError, match="one token in a process"):
            private_ray.forget_token()
    finally:
        private_ray._first_token.cache_clear()


def test_what_ends_a_run_has_a_note_of_where_the_logs_are_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no fixed shape") as ended, Cluster(
        address=None, run="test", cpus=1, gpus=0, logs=tmp_path / "ray"
    ):  # fmt: skip
        raise ModelError("no fixed shape")
    (note,) = ended.value.__notes__
    assert note == f"the logs of Ray and its workers are in {tmp_path / 'ray'}"
    assert list((tmp_path / "ray").iterdir())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
