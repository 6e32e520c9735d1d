"""The launches of a model for a GPU, and how full they make it, without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lib.artifact_fixtures import tiny_artifact, tiny_convnet
from tunerd.artifacts.launches import launches_of
from tunerd.artifacts.manifest import MANIFEST, sealed
from tunerd.artifacts.scheduling import schedule
from tunerd.colocation.planning.features import at_share, features_of
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.targets import cuda_target


def test_each_launch_has_its_blocks_and_threads_and_tenants_make_them_more() -> None:
    target = cuda_target("9.0", l2_bytes=50 << 20)
    lowered = lower(tiny_convnet(0), target)
    tasks = extract_tasks(lowered, target)
    one = launches_of(schedule(lowered.mod, tasks, {}, target).mod, ())
    assert sum(each["calls"] for each in one) == sum(task.weight for task in tasks)
    assert all(0 < each["threads"] <= 1024 for each in one)
    of_four = tuple(task.for_tenants(4) for task in tasks)
    four = launches_of(schedule(lowered.mod, of_four, {}, target, tenants=4).mod, ())
    assert four == [each | {"blocks": 4 * each["blocks"]} for each in one]


def test_waves_are_launches_over_what_the_device_holds_and_more_at_a_share(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    tiny_artifact(folder, seed=0)
    assert features_of(folder).waves == 0  # on cores
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["share"]["device_sm_count"] = 100
    manifest["launches"] = [
        {"blocks": 800, "threads": 256, "calls": 3},  # each fills the device once
        {"blocks": 400, "threads": 256, "calls": 1},
    ]
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest)))
    found = features_of(folder).named()
    assert found["waves"] == pytest.approx(3.5 / 4)
    assert at_share(found, 25) == pytest.approx(found | {"waves": 3.5})
