"""Kernels that serve several models at once, on a real GPU: each lane is its tenant alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tunerd
from tests.lib.super_models import CONVNET, ENCODER, artifact_of, super_artifact, tenant
from tunerd.artifacts import staging
from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.super_model import SuperModel
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.triton.source import TritonSource, is_installed
from tunerd.colocation import Engine, Plan
from tunerd.colocation.artifacts import weights_bytes_of
from tunerd.slices.base import Plan as SlicesPlan
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import FP16, TRITON, Arrays, Candidate, Model, TargetSpec, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning"),
]

NAMES = ("a", "b", "c")
LAUNCHES = (("a",), ("b",), ("c", "a"), ("b", "b"), ("c", "b", "a"), ("c", "c", "a", "b"))


@pytest.fixture(scope="module")
def target(whole_gpu: SlicesPlan) -> TargetSpec:
    return whole_gpu.target


def default(task: Task) -> Candidate | None:
    return None


def template(task: Task) -> Candidate | None:
    """Return the candidate that Triton's templates begin with, None where none fits."""
    if not is_installed() or TritonSource().takes(task):
        return None
    search = registry.SOURCES[TRITON].search(SearchSettings(seed=0, threads=1, sms=132))
    return next(iter(search.propose(task, 1).candidates), None)


@pytest.fixture(
    scope="module",
    params=[(CONVNET, ""), (ENCODER, ""), (CONVNET, FP16), (ENCODER, FP16)],
    ids=lambda param: " ".join(param).strip(),
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture(scope="module", params=[default, template], ids=lambda of: of.__name__)
def world(
    request: pytest.FixtureRequest,
    kind: tuple[str, str],
    target: TargetSpec,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[SuperModel, dict[str, LoadedModel]]:
    """Three tenants in one artifact, and an artifact of each alone, by their names."""
    name, precision = kind
    folder = tmp_path_factory.mktemp(name)
    models: list[Model] = [
        replace(tenant(name, seed, folder), precision=precision) for seed in range(3)
    ]
    given: dict[str, Any] = {"target": target, "winner_of": request.param}
    together = tunerd.load(super_artifact(models[0], folder / "super", **given))
    assert isinstance(together, SuperModel)
    alone = {}
    for tenant_name, model in zip(NAMES, models, strict=True):
        path = artifact_of(model, folder / f"alone-{tenant_name}", **given)
        alone[tenant_name] = tunerd.load(path)
        if tenant_name != "a":
            together.add(tenant_name, path)
    return together, alone


def own(model: SuperModel, name: str) -> str:
    return model.own if name == "a" else name


def is_near(one: Arrays, other: Arrays) -> bool:
    return all(np.allclose(one[k], other[k], rtol=1e-2, atol=1e-3) for k in other)


@pytest.mark.parametrize("names", LAUNCHES, ids="".join)
def test_each_request_has_the_answer_of_its_own_tenant(
    world: tuple[SuperModel, dict[str, LoadedModel]], names: tuple[str, ...]
) -> None:
    together, alone = world
    given = [random_inputs(together.inputs, seed) for seed in range(len(names))]
    found = together.run([(own(together, n), x) for n, x in zip(names, given, strict=True)])
    for name, inputs, outputs in zip(names, given, found, strict=True):
        assert is_near(outputs, alone[name](inputs))
        others = [model(inputs) for other, model in alone.items() if other != name]
        assert not any(is_near(outputs, other) for other in others)


@pytest.mark.parametrize("large_bytes", [1, 1 << 30], ids=["beside", "on one stream"])
def test_staged_launches_one_behind_the_other_mix_no_answers(
    world: tuple[SuperModel, dict[str, LoadedModel]],
    large_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cuda.bindings import driver

    from tunerd.system.cuda_driver import checked

    monkeypatch.setattr(staging, "_LARGE_BYTES", large_bytes)
    together, alone = world
    stream, bring, fetch = (int(checked(driver.cuStreamCreate(1))) for _ in range(3))
    lanes = together.staged_lanes(stream, 2)
    for turn in range(3):
        under_way = []
        for number, names in enumerate(LAUNCHES[-2:]):
            given = [random_inputs(together.inputs, 10 * turn + i) for i in range(len(names))]
            staged = lanes[4][number]
            staged.launch(
                [(own(together, n), x) for n, x in zip(names, given, strict=True)],
                stream,
                bring=bring,
                fetch=fetch,
            )
            under_way.append((names, given, staged))
        for names, given, staged in under_way:
            staged.wait()
            assert staged.secs() > 0
            for name, inputs, outputs in zip(names, given, staged.read(), strict=True):
                assert is_near(outputs, alone[name](inputs))


def test_one_graph_serves_the_tenants_that_it_was_captured_for(
    world: tuple[SuperModel, dict[str, LoadedModel]],
) -> None:
    together, alone = world
    names = ("c", "a", "b")
    capture = together.captured_lanes([own(together, n) for n in names])
    inputs = random_inputs(together.inputs, 5)
    capture.write({key: np.stack([array] * 4) for key, array in inputs.items()})
    capture.launch()
    found = capture.read()
    for row, name in enumerate((*names, names[0])):
        assert is_near({k: v[row] for k, v in found.items()}, alone[name](inputs))


def test_a_tenant_that_was_evicted_is_right_again(
    world: tuple[SuperModel, dict[str, LoadedModel]], target: TargetSpec
) -> None:
    together, alone = world
    few = tunerd.load(together._folder, tenant_bytes=2 * together.piece_bytes)
    assert isinstance(few, SuperModel)
    for name in NAMES[1:]:
        few.add(name, alone[name]._folder)
    inputs = random_inputs(few.inputs, 3)
    for name in ("b", "c", "b", "a", "c"):
        (found,) = few.run([(own(few, name), inputs)])
        assert is_near(found, alone[name](inputs))
    assert len(few.resident) == 2


def test_an_engine_serves_more_tenants_than_there_is_room_for(
    world: tuple[SuperModel, dict[str, LoadedModel]],
) -> None:
    together, alone = world
    paths = {name: model._folder for name, model in alone.items()} | {"a": together._folder}
    members = [f"{name}-{again}" for again in range(2) for name in NAMES]
    plan = Plan.model_validate(
        {
            "device": "cuda",
            "policy": {"kind": "time"},
            "members": [{"name": name, "artifact": str(paths[name[0]])} for name in members],
            "weights_gib": 3 * weights_bytes_of(together._folder) / (1 << 30),
        }
    )
    inputs = random_inputs(together.inputs, 4)
    with Engine(plan) as engine:
        asked = [(name, engine.submit(name, inputs)) for _ in range(20) for name in members]
        for name, future in asked:
            assert is_near(future.result(60), alone[name[0]](inputs))
        stats = engine.stats()
    assert not stats.faults
    assert all(group.brought for group in stats.groups.values())
