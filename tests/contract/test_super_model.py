"""Artifacts that serve several tenants at once: each lane computes what its tenant alone does."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

import tunerd
from tests.lib.artifact_fixtures import CORES, CUDA, LLVM, matmul_winner, model_of, tiny_artifact
from tests.lib.super_models import CONVNET, ENCODER, artifact_of, super_artifact, tenant
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.loading import LoadedModel, LoadError, map_weights
from tunerd.artifacts.manifest import LIBRARY, MANIFEST, WEIGHTS, read_all_variants, sealed
from tunerd.artifacts.one_size import size_of
from tunerd.artifacts.packing import pack_shares, pack_tenants
from tunerd.artifacts.super_model import SuperModel
from tunerd.builder.build import build_problem
from tunerd.errors import InputError
from tunerd.frontend.relax.lowering import lower
from tunerd.frontend.tasks import extract_tasks
from tunerd.system.arrays import random_inputs
from tunerd.vocabulary import SLOT_BYTES, Arrays

NAMES = ("a", "b", "c")  # b and c were added; a is the artifact's own
needs_cuda = pytest.mark.skipif(build_problem(CUDA) is not None, reason="NVRTC is missing")
pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")


@dataclass(frozen=True)
class World:
    """Three tenants: one artifact for 1, 2 and 4 at once, and one for each of them alone."""

    artifact: Path
    alone: Mapping[str, Path]
    models: Mapping[str, LoadedModel]

    def load(self, **options: Any) -> SuperModel:
        model = tunerd.load(self.artifact, **options)
        assert isinstance(model, SuperModel)
        for name in NAMES[1:]:
            model.add(name, self.alone[name])
        return model

    def requests(self, model: SuperModel, names: tuple[str, ...]) -> list[tuple[str, Arrays]]:
        """Return requests of tenants, each with inputs of its own."""
        return [
            (model.own if name == "a" else name, random_inputs(model.inputs, seed))
            for seed, name in enumerate(names)
        ]

    def check(self, model: SuperModel, names: tuple[str, ...]) -> None:
        requests = self.requests(model, names)
        found = model.run(requests)
        assert len(found) == len(names)
        for name, (_, inputs), outputs in zip(names, requests, found, strict=True):
            expected = self.models[name](inputs)
            assert outputs.keys() == expected.keys()
            for key, values in expected.items():
                assert outputs[key].shape == values.shape
                np.testing.assert_allclose(outputs[key], values, rtol=1e-5, atol=1e-6)


def made(kind: str, folder: Path) -> World:
    models = [tenant(kind, seed, folder) for seed in range(len(NAMES))]
    alone = {
        name: artifact_of(model, folder / name) for name, model in zip(NAMES, models, strict=True)
    }
    artifact = super_artifact(models[0], folder / "super")
    return World(artifact, alone, {name: tunerd.load(path) for name, path in alone.items()})


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    return {kind: made(kind, tmp_path_factory.mktemp(kind)) for kind in (CONVNET, ENCODER)}


@pytest.fixture(scope="module")
def world(worlds: dict[str, World]) -> World:
    return worlds[CONVNET]


def counts_of(model: SuperModel, requests: list[tuple[str, Arrays]]) -> list[int]:
    """Return how many lanes each launch for these requests has."""
    seen: list[int] = []
    kernels: set[int] = set()

    def note(function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        if before and not name.startswith("vm.builtin."):
            kernels.add(len(arguments[0].numpy()))
        if kernels and not before and name.startswith("vm.builtin."):
            seen.extend(kernels)
            kernels.clear()

    model.instrument(note)
    model.run(requests)
    model.instrument(None)
    return list(dict.fromkeys((*seen, *kernels)))


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CONVNET, ENCODER])
def test_each_lane_computes_what_its_tenant_alone_does(worlds: dict[str, World], kind: str) -> None:
    world = worlds[kind]
    model = world.load()
    for names in itertools.product(NAMES, repeat=1):
        world.check(model, names)
    for names in itertools.product(NAMES, repeat=2):  # all pairs, each tenant twice, too
        world.check(model, names)
    for names in (("c", "a", "b", "a"), ("b", "b", "c", "b"), ("a", "a", "a", "a")):
        world.check(model, names)


def test_the_winners_of_tasks_for_as_many_tenants_are_in_it(world: World, tmp_path: Path) -> None:
    model = tenant(CONVNET, 0, tmp_path)
    lowered = lower(model, LLVM)
    tasks = extract_tasks(lowered, LLVM, tenants=2)
    assert all(task.tenants == 2 for task in tasks)
    winner = matmul_winner(tasks)
    compile_artifact(
        lowered, tasks, {winner.task_id: winner}, LLVM, tmp_path / "tuned",
        model=model, pct=50, proofs=(CORES,), tenants=2,
    )  # fmt: skip
    (variant,) = read_all_variants(tmp_path / "tuned")
    assert [t["task_id"] for t in variant["tasks"] if t["candidate_id"]] == [winner.task_id]
    loaded = tunerd.load(tmp_path / "tuned")
    assert isinstance(loaded, SuperModel)
    loaded.add("c", world.alone["c"])
    world.check(loaded, ("c", "a"))


def test_lanes_that_are_left_over_change_nothing(world: World) -> None:
    model = world.load()
    world.check(model, ("c", "a", "b"))


def test_more_requests_than_lanes_are_several_launches(world: World) -> None:
    model = world.load()
    world.check(model, ("c", "a", "b", "a", "b", "c", "c"))


def test_the_smallest_number_of_lanes_that_fits_is_launched(world: World) -> None:
    model = world.load()
    assert model.counts == (1, 2, 4)
    for names, expected in (("a", [1]), ("ab", [2]), ("abc", [4]), ("abcab", [4, 1])):
        assert counts_of(model, world.requests(model, tuple(names))) == expected


def test_it_is_called_as_the_model_of_its_own_tenant(world: World) -> None:
    model = world.load()
    inputs = random_inputs(model.inputs, 3)
    expected = world.models["a"](inputs)
    for outputs in (model(inputs), model(*inputs.values())):
        for name, values in expected.items():
            np.testing.assert_allclose(outputs[name], values, rtol=1e-5, atol=1e-6)
    assert model.inputs == world.models["a"].inputs
    assert model.outputs == world.models["a"].outputs
    assert model.timed_calls(inputs, 2) > 0
    assert model.resident == (model.own,)  # what timing copied is no tenant


def test_weights_may_be_given_as_arrays(world: World) -> None:
    model = tunerd.load(world.artifact)
    assert isinstance(model, SuperModel)
    for name in NAMES[1:]:
        model.add(name, map_weights(world.alone[name] / WEIGHTS))
    world.check(model, ("b", "c"))


# --- memory ------------------------------------------------------------------------------------


def test_a_tenant_costs_its_piece_and_a_cold_one_a_copy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = world.load()
    weights = map_weights(world.alone["a"] / WEIGHTS).values()
    assert model.piece_bytes == sum(-(-w.nbytes // SLOT_BYTES) * SLOT_BYTES for w in weights)
    copied: list[int] = []
    memory = model._pieces._memory
    fill = memory.fill
    monkeypatch.setattr(memory, "fill", lambda p, data: (copied.append(len(data)), fill(p, data)))
    assert model.resident == (model.own,)
    world.check(model, ("b", "b"))
    world.check(model, ("b", "a"))
    assert len(copied) == 1
    assert copied[0] <= model.piece_bytes
    assert len(model._pieces._pieces) == 2
    model.bring(["c"])
    assert model.is_resident("c")
    world.check(model, ("c", "b"))
    assert len(copied) == 2


def test_the_tenant_that_was_not_used_for_longest_goes(world: World) -> None:
    size = world.load().piece_bytes
    model = world.load(tenant_bytes=3 * size)
    model.add("d", world.alone["b"])
    world.check(model, ("b", "c"))
    world.check(model, ("b", "b"))
    model.bring(["d"])
    assert not model.is_resident("c")
    assert model.resident == (model.own, "b", "d")
    world.check(model, ("c", "b"))  # it comes back, with its weights
    assert len(model._pieces._pieces) == 3


def test_weights_that_are_held_stay(world: World) -> None:
    model = world.load(tenant_bytes=2 * world.load().piece_bytes)
    model.hold(["b"])
    with pytest.raises(RuntimeError, match="all 2 pieces for tenants are in use"):
        model.run(world.requests(model, ("c",)))
    with pytest.raises(RuntimeError, match="'b' is in use"):
        model.remove("b")
    model.release(["b"])
    world.check(model, ("c",))
    model.remove("b")
    assert model.tenants == (model.own, "c")


def test_a_budget_below_one_tenant_is_refused(world: World) -> None:
    with pytest.raises(LoadError, match="not enough for one tenant"):
        tunerd.load(world.artifact, tenant_bytes=SLOT_BYTES)


def test_threads_may_bring_and_run_at_once(world: World) -> None:
    model = world.load(tenant_bytes=3 * world.load().piece_bytes)
    errors: list[BaseException] = []

    def work(names: tuple[str, ...]) -> None:
        try:
            for _ in range(20):
                world.check(model, names)
        except BaseException as error:
            errors.append(error)

    # Three pieces: the own, and two that four threads want for one tenant each.
    threads = [threading.Thread(target=work, args=((name,),)) for name in "abcb"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# --- what is refused ---------------------------------------------------------------------------


def test_another_architecture_is_no_tenant(world: World, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    other = model_of(nodes, {"w": np.ones((3, 4))}, inputs={"x": (2, 3)}, outputs={"y": (2, 4)})
    artifact_of(other, tmp_path / "other")
    model = world.load()
    with pytest.raises(LoadError, match=r"not of the architecture .* `tunerd tenant MODEL.onnx"):
        model.add("other", tmp_path / "other")
    weights = dict(map_weights(world.alone["b"] / WEIGHTS))
    with pytest.raises(LoadError, match="there is no tensor 'weight_0'"):
        model.add("other", {"weight_1": weights["weight_1"]})
    weights["weight_0"] = weights["weight_0"].astype("float16")
    with pytest.raises(LoadError, match="'weight_0' is float16"):
        model.add("other", weights)
    assert model.tenants == (model.own, "b", "c")


def test_names_are_of_one_tenant_each(world: World) -> None:
    model = world.load()
    with pytest.raises(ValueError, match="there is a tenant 'b'"):
        model.add("b", world.alone["c"])
    with pytest.raises(KeyError, match="no tenant 'd'"):
        model.run([("d", random_inputs(model.inputs, 0))])
    with pytest.raises(ValueError, match="own"):
        model.remove(model.own)


def test_inputs_are_checked_before_anything_runs(world: World) -> None:
    model = world.load()
    inputs = random_inputs(model.inputs, 0)
    with pytest.raises(ValueError, match="input 'x' is float32"):
        model.run([("b", inputs | {"x": np.zeros((4, 3, 8, 8), "float32")})])
    with pytest.raises(TypeError, match="got inputs named"):
        model.run([("b", {"x": inputs["x"]})])


def test_weights_that_were_changed_are_no_tenant(world: World, tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "d", tuned=False, seed=4)
    path = tmp_path / "d" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(LoadError, match="was changed"):
        world.load().add("d", tmp_path / "d")


# --- the artifact ------------------------------------------------------------------------------


def test_an_artifact_has_a_variant_for_each_number_and_weights_once(world: World) -> None:
    variants = read_all_variants(world.artifact)
    assert sorted(v["tenants"] for v in variants) == [1, 2, 4]
    assert len({v["files"][WEIGHTS] for v in variants}) == 1
    assert len(list(world.artifact.iterdir())) == 5  # three libraries, weights, the manifest
    alone = read_all_variants(world.alone["b"])[0]
    assert {v["architecture"] for v in variants} == {alone["architecture"]}
    storage = {v["tenants"]: v["storage_bytes"] for v in variants}
    assert storage[4] == 4 * storage[1]


def test_one_number_of_tenants_may_be_named_alone(world: World) -> None:
    with size_of(Path(f"{world.artifact}#tenants=2")) as folder:
        model = tunerd.load(folder)
        assert isinstance(model, SuperModel)
        assert model.counts == (2,)
        model.add("b", world.alone["b"])
        world.check(model, ("b",))
        world.check(model, ("b", "a"))


def test_artifacts_of_several_shares_for_tenants_are_joined(world: World, tmp_path: Path) -> None:
    model = tenant(CONVNET, 0, tmp_path)
    cores = len(os.sched_getaffinity(0))
    shares = [
        super_artifact(model, tmp_path / str(count), (1, 2), proof=replace(CORES, sm_count=count))
        for count in (cores, cores + 100)
    ]
    assert len(pack_shares(shares, tmp_path / "packed")) == 4
    loaded = tunerd.load(tmp_path / "packed")
    assert isinstance(loaded, SuperModel)
    assert loaded.counts == (1, 2)
    assert loaded.manifest["share"]["sm_counts"] == [cores]
    loaded.add("c", world.alone["c"])
    world.check(loaded, ("c", "a", "c"))


def test_what_does_not_belong_together_is_not_packed(world: World, tmp_path: Path) -> None:
    two = world.artifact.with_name("super-2")
    other = artifact_of(tenant(CONVNET, 7, tmp_path), tmp_path / "7", tenants=4)
    with pytest.raises(InputError, match="of another model"):
        pack_tenants([two, other], tmp_path / "packed")
    with pytest.raises(InputError, match="leave one of them out"):
        pack_tenants([two, two], tmp_path / "packed")
    with pytest.raises(InputError, match="--tenants"):
        pack_tenants([two, world.alone["a"]], tmp_path / "packed")


def test_a_manifest_whose_tenants_cannot_be_is_refused(world: World, tmp_path: Path) -> None:
    said = json.loads((world.artifact.with_name("super-2") / MANIFEST).read_text())
    for wrong in ({"tenants": 0}, {"tenants": "2"}, {"counters": 3}, {"format_version": 3}):
        (tmp_path / MANIFEST).write_text(json.dumps(sealed(said | wrong)))
        with pytest.raises(LoadError, match="cannot be read"):
            tunerd.load(tmp_path)


@needs_cuda
def test_kernels_for_tenants_are_compiled_for_gpus_and_captured(tmp_path: Path) -> None:
    model = tenant(ENCODER, 0, tmp_path)
    lowered = lower(model, CUDA)
    tasks = extract_tasks(lowered, CUDA)
    sizes = {}
    for count in (1, 4):
        folder = tmp_path / f"cuda-{count}"
        compile_artifact(lowered, tasks, {}, CUDA, folder, model=model, pct=40, tenants=count)
        library = (folder / LIBRARY).read_bytes()
        assert b"cubin" in library
        assert b"vm.builtin.cuda_graph.run_or_capture" in library
        (variant,) = read_all_variants(folder)
        sizes[count] = variant["storage_bytes"]
    assert sizes[4] >= 3 * sizes[1] > 0
