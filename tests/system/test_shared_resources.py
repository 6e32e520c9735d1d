"""What sessions of one process share."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import onnx
import pytest

from tests.lib import PYTHON_PATH
from tests.lib.models import conv_net
from tests.lib.ray_processes import short_folder
from tunerd.errors import InfrastructureError
from tunerd.frontend.kernels import Selection
from tunerd.frontend.model import read_model
from tunerd.records import Store
from tunerd.runs import shared
from tunerd.runs.shared import SharedCluster, SharedResources
from tunerd.settings import TuneSettings
from tunerd.studies.matrix.building import build_all
from tunerd.studies.matrix.folder import opened
from tunerd.system import targets
from tunerd.vocabulary import METASCHEDULE, Build, Candidate, TargetSpec

# Two levels; prints, of each, its cluster, its tuners, and the slices that it leaves.
TWO = """
import json, sys
from pathlib import Path
from tunerd.runs import (plan as preparation, run as session, plan, run,)
from tunerd.settings import TuneSettings
from tunerd.telemetry.progress import QuietProgress
from tunerd.runs.shared import SharedResources

model, out = map(Path, sys.argv[1:])
def settings(pct):
    return TuneSettings(
        model=model, out=out / str(pct), gpu_pct=pct, slice_kind="simulated", trials=8, tuners=2
    )
with SharedResources(plan.read(settings(50))) as shared:
    for pct in (50, 25):
        run.search(settings(pct), QuietProgress(), shared=shared)
        cluster = shared._private._cluster
        tuners = {name: handle._actor_id.hex() for name, handle in cluster._tuners.items()}
        print(json.dumps({"cluster": id(cluster), "tuners": tuners, "left": [*cluster.slice_ids]}))
    shared.end_cluster()
    print(json.dumps(cluster._ray.is_initialized()))
"""


def printed(script: str, *given: Path) -> list[str]:
    """Return the lines that a script prints in a process of its own."""
    with short_folder() as runtime:
        ended = subprocess.run(
            [sys.executable, "-c", script, *map(str, given)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": PYTHON_PATH, "TUNERD_RUNTIME_FOLDER": str(runtime)},
        )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.nightly
def test_sessions_share_ray_and_its_tuners_and_leave_no_slice(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    first, second, is_up = map(json.loads, printed(TWO, tmp_path / "net.onnx", tmp_path))
    assert first == second
    assert first["left"] == []
    assert not is_up
    trials = {}
    for pct in (50, 25):
        with Store.read(tmp_path / str(pct)) as store:
            trials[pct] = sum(store.counts().values())
            assert {p.sm_count for p in store.proofs()} == {pct}
    assert trials[50] == trials[25] > 8  # and the defaults


# Two sizes of a model; prints how often Ray was started, and the tuners of each run.
SIZES = """
import json, sys
import tunerd
from tunerd.runs import shared

clusters, tuners = [], []

class Seen(shared.Cluster):
    def __init__(self, **given):
        super().__init__(**given)
        clusters.append(self)

    def end_session(self):
        tuners.append(sorted(handle._actor_id.hex() for handle in self._tuners.values()))
        super().end_session()

shared.Cluster = Seen
run = tunerd.tune_sizes(
    sys.argv[1], out=sys.argv[2], cpu_pct=50, batch=(1, 2), trials=4, tuners=1, slices=1,
    no_wait=True,
)
up = clusters[0]._connection.is_up
print(json.dumps({"clusters": len(clusters), "tuners": tuners, "up": up}))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_sizes_of_a_model_share_ray_and_its_tuners(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    said = json.loads(printed(SIZES, tmp_path / "net.onnx", tmp_path / "run")[-1])
    assert said["clusters"] == 1
    first, second = said["tuners"]
    assert first == second != []
    assert not said["up"]
    for size in ("batch1", "batch2"):
        with Store.read(tmp_path / "run" / "sizes" / size) as store:
            assert sum(store.counts().values()) >= 4


class Started:
    """Stands for a cluster that notes what becomes of it."""

    said: ClassVar[list[str]] = []

    def __init__(self, *, run: str, **_: Any) -> None:
        self.said.append(f"start {run}")

    def end_session(self) -> None:
        self.said.append("session")

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.said.append("end")


def test_runs_of_several_models_share_a_cluster_and_one_that_has_none_starts_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "Cluster", Started)
    monkeypatch.setattr(Started, "said", [])
    layout: Any = SimpleNamespace(slices=())
    models: list[Any] = [SimpleNamespace(name=name) for name in ("one", "two")]
    with SharedCluster() as private:
        lent = []
        for model in models:
            assert private.is_up == bool(lent)
            resources = SharedResources(model, private=private)
            with resources, resources.cluster(layout, logs=tmp_path) as cluster:
                lent.append(cluster)
        assert lent[0] is lent[1]
        first, *rest = Started.said
        assert first.startswith("start one-")
        assert rest == ["session", "session"]
    assert Started.said[-1] == "end"
    own = SharedResources(models[1])
    with own, own.cluster(layout, logs=tmp_path):
        assert Started.said[-1].startswith("start two-")
    assert Started.said[-1] == "end"


def test_a_model_is_lowered_once_for_each_target(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    resources = SharedResources(read_model(tmp_path / "net.onnx"))
    target = targets.cpu_target_json(1)
    kernels = resources.kernels(target)
    assert resources.kernels(target) is kernels
    chosen = Selection((kernels.tasks[0].task_id,), 8)
    assert chosen.among(resources.lower(target).result().tasks) == kernels.tasks[:1]


def test_a_model_whose_lowering_was_ended_is_lowered_once_more(tmp_path: Path) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    resources = SharedResources(read_model(tmp_path / "net.onnx"))
    target = targets.cpu_target_json(1)
    ended = resources.lower(target)
    os.kill(ended.pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="SIGKILL"):
        ended.result()
    assert resources.kernels(target).tasks


def test_what_a_session_has_built_is_lent_for_its_target_and_kept_by_a_matrix(
    tmp_path: Path,
) -> None:
    onnx.save(conv_net(), tmp_path / "net.onnx")
    resources = SharedResources(read_model(tmp_path / "net.onnx"))
    one_core, two_cores = (TargetSpec("llvm", f'{{"num-cores":{n}}}') for n in (1, 2))
    candidate = Candidate("t", "c" * 16, METASCHEDULE)
    library = b"\x7fELF"
    digest = hashlib.sha256(library).hexdigest()
    build = Build(candidate, library, digest, 0.1, (), (), "llvm")
    resources.keep(one_core, [build])
    assert resources.build_of(one_core, candidate) == build
    assert resources.build_of(two_cores, candidate) is None
    base = TuneSettings(
        model=tmp_path / "net.onnx", out=tmp_path / "m", slice_kind="cpu", cpu_pct=50
    )
    with opened(tmp_path / "m", {}) as kept:
        said: list[str] = []
        found = build_all([candidate], kept, one_core, base, resources, said.append)
        assert found == {candidate.candidate_id: build}
        assert kept.build_of(candidate) == build
        assert not said  # no tuner was asked
