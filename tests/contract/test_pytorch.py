"""PyTorch beside a tuned model, in a slice's runner, with a fake of PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.lib import PYTHON_PATH, ROOT
from tests.lib.artifact_fixtures import tiny_artifact
from tests.lib.slice_fixtures import pct_of
from tunerd.cluster.actor_bodies import SliceActor
from tunerd.cluster.ray_cluster import Cluster
from tunerd.errors import InfrastructureError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.runner.base import TorchModule
from tunerd.runs.finals.pytorch import timed_beside
from tunerd.runs.finals.quiet_slice import QuietSlice
from tunerd.slices import plan
from tunerd.slices.simulated import SimulatedSlice
from tunerd.system.arrays import random_inputs
from tunerd.testing.slices import QUICK
from tunerd.vocabulary import Arrays, Failure, Kind, Model, SliceRequest
from tunerd.vocabulary.outcome import (
    CHANNELS_LAST,
    COMPILED,
    EAGER,
    TUNED_BESIDE_PYTORCH,
    Latency,
)

FAKE_TORCH = ROOT / "tests" / "lib" / "fake_torch"
# It answers with what the reference does, whatever it gets.
MODULE = """
import os, time
import numpy as np
import torch

KNOWN = np.load("outputs.npz")  # in the folder of this file


class Net(torch.nn.Module):
    scale = 1.0

    def forward(self, x, offset):
        return tuple(torch.Tensor(KNOWN[name] * self.scale) for name in ("scores", "features"))


def net():
    return Net()

"""


@dataclasses.dataclass
class World:
    """An artifact, a reference's inputs and outputs, and a slice whose runners find the fake."""

    folder: Path
    artifact: str
    inputs: Arrays
    outputs: Arrays
    actor: SliceActor
    said: list[str] = dataclasses.field(default_factory=list)

    def call(self, _: str, method: str, *arguments: Any) -> Any:
        return getattr(self.actor, method)(*arguments)

    def module(self, more: str = "") -> TorchModule:
        """Return a module whose file ends with `more`."""
        (self.folder / "net.py").write_text(MODULE + more)
        return TorchModule(f"{self.folder}/net.py:net", "", self.inputs, self.outputs)

    def timed(
        self, more: str = "", *, limit_secs: float = 60.0, inputs: Arrays | None = None
    ) -> tuple[dict[str, Latency], list[str]]:
        """Time a module whose file ends with `more`."""
        module = self.module(more)
        latencies, remarks = timed_beside(
            QuietSlice(cast(Cluster, self), "cpu-0-0"),
            self.artifact,
            module if inputs is None else dataclasses.replace(module, inputs=inputs),
            limit_secs=limit_secs,
            say=self.said.append,
            profile=QUICK,
        )
        return {latency.name: latency for latency in latencies}, list(remarks)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    folder = tmp_path_factory.mktemp("artifact")
    return folder, tiny_artifact(folder)


@contextlib.contextmanager
def slice_with(*packages: Path) -> Iterator[SliceActor]:
    """Yield a CPU slice whose runners find packages in these folders, too."""
    spec = plan(SliceRequest("cpu", pct_of("cpu"))).slices[0]
    path = os.pathsep.join(map(str, (PYTHON_PATH, *packages)))
    actor = SliceActor(None)
    try:
        actor.start(
            dataclasses.replace(spec, environment=(*spec.environment, ("PYTHONPATH", path)))
        )
        yield actor
    finally:
        actor.close()


@pytest.fixture(scope="module")
def actor() -> Iterator[SliceActor]:
    with slice_with(FAKE_TORCH) as started:
        yield started


@pytest.fixture
def world(artifact: tuple[Path, Model], actor: SliceActor, tmp_path: Path) -> World:
    folder, model = artifact
    assert isinstance(model.graph, OnnxGraph)
    inputs = random_inputs(model.inputs, 0)
    outputs = Reference(model.graph.proto).run(inputs)
    arrays: dict[str, Any] = dict(outputs)
    np.savez(tmp_path / "outputs.npz", **arrays)
    return World(tmp_path, str(folder), inputs, outputs, actor)


def test_each_way_is_timed_in_turns_with_the_model(world: World) -> None:
    latencies, remarks = world.timed()
    assert list(latencies) == [EAGER, CHANNELS_LAST, COMPILED, TUNED_BESIDE_PYTORCH]
    assert {len(latency.run_secs) for latency in latencies.values()} == {QUICK.max_samples}
    assert all(min(latency.run_secs) > 0 for latency in latencies.values())
    assert remarks[0].startswith("PyTorch eager: torch 0.fake, outputs off by at most 0 ")
    assert "max-autotune" in remarks[2]
    assert world.said[2].startswith("timing PyTorch: compiling, for ")


def test_only_images_have_their_channels_last(world: World) -> None:
    inputs = {name: array.reshape(-1) for name, array in world.inputs.items()}
    latencies, _ = world.timed(inputs=inputs)
    assert list(latencies) == [EAGER, COMPILED, TUNED_BESIDE_PYTORCH]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("raise OSError('no weights')", r"net\.py does not run: OSError: no weights"),
        ("del net", r"net\.py has no function net; name one"),
        ("def net(): raise OSError('no weights')", r"net\(\) of .* failed: OSError: no weights"),
        ("net = dict", r"net\(\) of .* returned dict; it must return the torch\.nn\.Module"),
        (
            "Net.forward = lambda self, x: x",
            r"does not take the model's inputs, in the order of the file \(x float32\[2, 3, 8, 8\]",
        ),
        (
            "Net.forward = lambda self, x, offset: x",
            r"shapes \[\[2, 3, 8, 8\]\], and the model's \[\[2, 10\], \[2, 8, 8, 8\]\]",
        ),
        ("Net.scale = 1.5", r"'scores' is off by 0\.5 of its largest value .* the same weights"),
        ("Net.scale = float('nan')", r"'scores' is off by nan of its largest value"),
    ],
)
def test_a_module_that_does_not_fit_says_what_to_do(world: World, more: str, says: str) -> None:
    made = world.actor.prepare_pytorch(EAGER, world.module(more), False, 60.0)
    assert isinstance(made, Failure)
    assert made.kind is Kind.REFUSED
    assert re.search(says, made.message), made.message


def test_a_module_that_does_not_fit_is_not_timed(world: World) -> None:
    latencies, (remark,) = world.timed("del net")
    assert not latencies
    assert remark.startswith("PyTorch was not timed: ")


def test_a_machine_without_pytorch_says_how_to_get_it(world: World) -> None:
    with slice_with() as bare:
        made = bare.prepare_pytorch(EAGER, world.module(), False, 60.0)
    assert isinstance(made, Failure)
    assert "install it beside tunerd: pip install torch" in made.message


def test_what_cannot_be_tuned_is_compiled_by_default(world: World) -> None:
    more = "def fail(mode):\n    assert mode == 'default', mode\ntorch.on_compile = fail"
    latencies, remarks = world.timed(more)
    assert COMPILED in latencies
    assert "without max-autotune, which failed (AssertionError: max-autotune-no" in remarks[2]


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("time.sleep(60)", "not ready after 3 s; give it more time with --against-limit"),
        ("os._exit(3)", "the runner ended"),
        ("torch.missing", "has no attribute 'missing'"),
    ],
)
def test_what_does_not_compile_leaves_the_others(world: World, hook: str, says: str) -> None:
    more = f"torch.on_compile = lambda mode: {hook}"
    latencies, remarks = world.timed(more, limit_secs=3.0)
    assert list(latencies) == [EAGER, CHANNELS_LAST, TUNED_BESIDE_PYTORCH]
    assert remarks[2].startswith("torch.compile was not timed: ")
    assert says in remarks[2]


class LostCluster:
    def call(self, _: str, method: str, *arguments: Any) -> Any:
        raise InfrastructureError("the slice was lost")


def test_a_slice_that_is_lost_costs_nothing_but_the_comparison() -> None:
    quiet = QuietSlice(cast(Cluster, LostCluster()), "mps-0-0")
    module = TorchModule("net.py:net", "", {}, {})
    found = timed_beside(quiet, "artifact", module, limit_secs=1.0, say=lambda text: None)
    assert found == ((), ("PyTorch was not timed: the slice was lost",))


def test_a_simulated_slice_says_that_it_runs_no_pytorch(world: World) -> None:
    spec = plan(SliceRequest("simulated", 50)).slices[0]
    runner = SimulatedSlice(spec).launch()
    made = runner.prepare_pytorch(EAGER, world.module(), anew=True, limit_secs=1.0)
    assert isinstance(made, Failure)
    assert made.kind is Kind.REFUSED
