"""What a run counts, by unit and through a real Ray cluster into a real Prometheus."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest

from tests.lib.models import conv_net
from tests.lib.ray_processes import Child, child, connections, living, short_folder
from tests.lib.tune_process import Run
from tests.lib.waiting import until
from tunerd.records import Store
from tunerd.telemetry.metrics import CATALOG, COMMON_LABELS, Metrics, Name
from tunerd.telemetry.progress import TaskProgress
from tunerd.vocabulary import (
    CapProof,
    Conditions,
    Failure,
    Kind,
    Measurement,
    Stage,
)

PROOF = CapProof("mps-0-0", "NVIDIA H200", 52, 132, "mps", True)
MEASURED = Measurement((1e-3,), 1, "search-v1", "mps-0-0", 52)
UNITS = ("_seconds", "_ratio", "_sms", "_workers")


class Recorded:
    """Keeps numbers as a metrics server would."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.calls = 0

    def __call__(self, name: Name, value: float, labels: Mapping[str, str]) -> None:
        assert tuple(labels) == (*COMMON_LABELS, *name.labels)
        key = (name.name, *(labels[label] for label in name.labels))
        self.values[key] = value + (self.values.get(key, 0.0) if name.only_grows else 0.0)
        self.calls += 1


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def metrics(recorded: Recorded) -> Metrics:
    return Metrics(recorded, model="net", share="gpu40")


# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CATALOG, ids=lambda n: n.name)
def test_a_name_has_its_unit_and_says_whether_it_only_grows(name: Name) -> None:
    assert re.fullmatch(r"tunerd_[a-z]+(_[a-z]+)*", name.name)
    assert name.help.endswith(".")
    if not name.only_grows:
        assert name.name.endswith(UNITS)
    # A trial, a worker or a run in a label would make a series each, for ever.
    assert set(name.labels) <= {"state", "stage", "kind", "role", "task", "task_id"}


def test_no_name_is_there_twice() -> None:
    assert len({n.name for n in CATALOG}) == len(CATALOG)


# --- events ------------------------------------------------------------------------------------


def test_trials_are_counted_by_how_they_ended(metrics: Metrics, recorded: Recorded) -> None:
    crash = Failure(Stage.RUN, Kind.CRASH, "x")
    lost = Failure(Stage.RUN, Kind.COLLATERAL, "x")
    metrics.trials_ended([MEASURED, crash, MEASURED, lost, crash])
    assert recorded.values == {
        ("tunerd_trials_total", "measured"): 2,
        ("tunerd_trials_total", "failed"): 2,
        ("tunerd_trial_failures_total", "run", "crash"): 2,
        ("tunerd_trials_requeued_total", "collateral"): 1,
    }


def test_trials_that_others_disturbed_are_counted(metrics: Metrics, recorded: Recorded) -> None:
    seen = Conditions(disturbed_by="hot: software thermal slowdown")
    metrics.trials_ended([MEASURED, dataclasses.replace(MEASURED, conditions=seen)])
    assert recorded.values["tunerd_trials_disturbed_total",] == 1


def test_proofs_and_restarts_are_counted(metrics: Metrics, recorded: Recorded) -> None:
    metrics.proved(PROOF)
    metrics.restarted("slice")
    metrics.proved(PROOF)
    assert recorded.values == {
        ("tunerd_cap_proofs_total",): 2,
        ("tunerd_slice_sms",): 52,
        ("tunerd_worker_restarts_total", "slice"): 1,
    }


def test_workers_are_busy_for_a_part_of_the_time_in_which_they_were_there(
    metrics: Metrics, recorded: Recorded
) -> None:
    metrics.workers("tuner", 0, 10.0)
    metrics.workers("tuner", 4, 20.0)
    metrics.answered("tuner", 18.0)
    metrics.workers("tuner", 2, 30.0)
    metrics.workers("slice", 0, 30.0)
    assert recorded.values["tunerd_worker_busy_ratio", "tuner"] == 18.0 / (4 * 10 + 2 * 10)
    assert recorded.values["tunerd_worker_busy_ratio", "slice"] == 0


def test_what_has_not_changed_is_not_set_again(metrics: Metrics, recorded: Recorded) -> None:
    task = TaskProgress("conv", 1, 2e-3, None, 0, 1.0, "a" * 12)
    for _ in range(5):
        metrics.task(task.task_id, task)
        metrics.kernels(2e-3, 1e-3)
    assert recorded.calls == 3
    assert recorded.values["tunerd_task_default_seconds", "conv", "a" * 12] == 2e-3


# --- a real cluster, and a real server ---------------------------------------------------------

TOKEN = "5" * 64

# A cluster on loopback whose node serves metrics; open until its stdin ends.
NODE = """
import os, sys
from ray.cluster_utils import Cluster
os.makedirs(os.environ["RAY_TMPDIR"] + "/ray", exist_ok=True)
cluster = Cluster(initialize_head=True, head_node_args={
    "num_cpus": 2, "num_gpus": 0, "object_store_memory": 100 << 20,
    "node_ip_address": "127.0.0.1", "include_dashboard": False,
})
port = cluster.head_node.metrics_export_port
print('{"address": "%s", "metrics_port": %d}' % (cluster.address, port), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that scrapes one port, by its HTTP API."""

    url: str

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """Return the value of each series by the values of our own labels."""
        ours = ("state", "role", "task_id", "kind")
        asked = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{asked}", timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
        assert document["status"] == "success"
        return {
            tuple(r["metric"][n] for n in ours if n in r["metric"]): float(r["value"][1])
            for r in document["data"]["result"]
        }

    def last(self, name: str) -> dict[tuple[str, ...], float]:
        """Return what was scraped last of a metric, also after its process has ended."""
        return self.query(f"last_over_time(ray_{name}[1h])")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextlib.contextmanager
def prometheus(folder: Path, scraped_port: int) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is not installed")
        pytest.skip("needs prometheus; install it, for example: apt-get install prometheus")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        f"- {{job_name: ray, static_configs: [{{targets: ['127.0.0.1:{scraped_port}']}}]}}\n"
    )
    url = f"http://127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={url.removeprefix('http://')}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: process.poll() is not None or is_ready(url))
        assert process.poll() is None, (folder / "prometheus.log").read_text()[-2000:]
        yield Prometheus(url)
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True)
class Scraped:
    run: Run
    server: Prometheus
    cluster: Child


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    """A run on a cluster that is scraped, one of whose slices was killed."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra `cluster`")
    folder = tmp_path_factory.mktemp("metrics")
    onnx.save(conv_net(), folder / "net.onnx")
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps its processes on loopback
        "RAY_metrics_report_interval_ms": "1000",
    }
    with contextlib.ExitStack() as stack:
        short = stack.enter_context(short_folder())
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        cluster = stack.enter_context(child(NODE, RAY_TMPDIR=str(short), **environment))
        server = stack.enter_context(prometheus(folder, cluster.said["metrics_port"]))
        for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
            patch.setenv(name, environment[name])  # the driver looks for a node at its own address
        options = ("--slice", "simulated", "--address", cluster.said["address"])
        run = Run(folder / "run", folder / "net.onnx", (*options, "--trials", "40"))
        run.start()
        run.wait_for(lambda: run.measured() >= 8)
        slices = [p for p in cluster.family() if is_slice(p)]
        assert len(slices) == 2
        slices[0].kill()
        code, _, said = run.end()
        assert code < 10, said
        # The node's processes pass on what they have once a second.
        ended = len([r for r in records(run) if r.result is not None])
        until(lambda: sum(server.last("tunerd_trials_total").values()) == ended)
        yield Scraped(run, server, cluster)
        family = cluster.family()
    assert living(family) == []


def is_slice(process: psutil.Process) -> bool:
    try:
        return "".join(process.cmdline()[:1]).startswith("ray::SliceActor")
    except psutil.Error:
        return False


def records(run: Run) -> list[Any]:
    with Store.read(run.folder) as store:
        return list(store.records())


@pytest.mark.slow
def test_prometheus_counts_the_trials_that_the_store_has(scraped: Scraped) -> None:
    ended = [r.result for r in records(scraped.run)]
    measured = sum(isinstance(r, Measurement) for r in ended)
    failed = len(ended) - measured
    expected = {("measured",): measured} | ({("failed",): failed} if failed else {})
    assert scraped.server.last("tunerd_trials_total") == expected


@pytest.mark.slow
def test_prometheus_has_the_best_time_of_each_task(scraped: Scraped) -> None:
    with Store.read(scraped.run.folder) as store:
        best = {(t.task_id,): store.best(t.task_id) for t in store.tasks()}
        default = {(t.task_id,): store.best(t.task_id, is_default=True) for t in store.tasks()}
    for name, found in (("best", best), ("default", default)):
        expected = {key: r.run_secs for key, r in found.items() if r is not None}
        assert scraped.server.last(f"tunerd_task_{name}_seconds") == pytest.approx(expected)


@pytest.mark.slow
def test_prometheus_counts_the_proofs_and_the_restart_of_a_killed_slice(scraped: Scraped) -> None:
    with Store.read(scraped.run.folder) as store:
        proofs = len(store.proofs())
    assert proofs == 3
    assert scraped.server.last("tunerd_cap_proofs_total") == {(): proofs}
    assert scraped.server.last("tunerd_worker_restarts_total") == {("slice",): 1}
    assert scraped.server.last("tunerd_slice_sms") == {(): 50}


@pytest.mark.slow
def test_prometheus_has_the_time_in_which_workers_were_busy(scraped: Scraped) -> None:
    with Store.read(scraped.run.folder) as store:
        spans = store.spans()
    busy = {
        (role,): sum(s.busy_secs or 0.0 for s in spans if s.role == role)
        for role in ("tuner", "slice")
    }
    assert scraped.server.last("tunerd_worker_busy_seconds_total") == pytest.approx(busy)
    ratios = scraped.server.query("max_over_time(ray_tunerd_worker_busy_ratio[1h])")
    assert 0 < ratios["tuner",] <= 1


@pytest.mark.slow
def test_the_series_of_a_run_have_its_model_and_share(scraped: Scraped) -> None:
    query = 'count(last_over_time({__name__=~"ray_tunerd_.*",model="net",share="cpu50"}[1h]))'
    every = 'count(last_over_time({__name__=~"ray_tunerd_.*"}[1h]))'
    assert scraped.server.query(query) == scraped.server.query(every) != {}


@pytest.mark.slow
def test_a_cluster_that_is_scraped_listens_on_loopback_alone(scraped: Scraped) -> None:
    addresses = {
        c.laddr.ip.removeprefix("::ffff:")
        for p in scraped.cluster.family()
        for c in connections(p)
        if c.status == psutil.CONN_LISTEN
    }
    assert addresses == {"127.0.0.1"}
