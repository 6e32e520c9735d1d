"""Concatenations and splits are left out: kernels write and read parts of what is joined."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import helper

import tunerd
from tests.contract.test_triton import require_agreement
from tests.lib.lowered import CUDA, LLVM, load
from tests.lib.models import floats, model
from tunerd.artifacts.compile import compile_artifact
from tunerd.artifacts.in_place import in_place
from tunerd.artifacts.scheduling import schedule
from tunerd.builder.build import build_problem
from tunerd.builder.library import load_tvm
from tunerd.candidates import registry
from tunerd.candidates.base import SearchSettings
from tunerd.candidates.triton.source import templates_of
from tunerd.frontend.onnx.reference import Reference, agree
from tunerd.frontend.relax.joins import joins_of
from tunerd.frontend.relax.lowering import Lowered, lower
from tunerd.frontend.tasks import extract_tasks, like
from tunerd.system.arrays import random_inputs
from tunerd.system.targets import cpu_target_json
from tunerd.vocabulary import FMA, METASCHEDULE, TRITON, Candidate, Model, TargetSpec, Task

if TYPE_CHECKING:
    from tvm.ir import IRModule

pytestmark = pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
needs_cuda = pytest.mark.skipif(
    build_problem(CUDA) is not None, reason=f"no CUDA build: {build_problem(CUDA)}"
)
SIZE = 20  # of an image, so that feature maps are more than a few values


class Net:
    """Writes a graph of convolutions, with 16 channels unless something else is said."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self._channels = {"x": 3}

    def __call__(self, op: str, *inputs: str, channels: int = 0, **attributes: Any) -> str:
        out = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], **attributes))
        self._channels[out] = channels or self._channels[inputs[0]]
        return out

    def conv(self, x: str, channels: int = 16, size: int = 3) -> str:
        name = f"w{len(self.nodes)}"
        self.weights[name] = floats(channels, self._channels[x], size, size, seed=len(self.nodes))
        made = self("Conv", x, name, channels=channels, pads=[size // 2] * 4)
        return self("Relu", made)

    def linear(self, x: str, depth: int = SIZE) -> str:
        """Multiply what lies along the last axis, which leaves 32 values there."""
        name = f"w{len(self.nodes)}"
        self.weights[name] = floats(depth, 32, seed=len(self.nodes))
        return self("MatMul", x, name)

    def halves(self, x: str, *, has_slices: bool = False) -> list[str]:
        half = self._channels[x] // 2
        name = f"halves{len(self.nodes)}"
        if has_slices:
            made = []
            for n in range(2):
                self.weights |= {f"{name}.{n}": np.array([n * half]), "axis": np.array([1])}
                self.weights[f"{name}.{n + 1}"] = np.array([(n + 1) * half])
                limits = (f"{name}.{n}", f"{name}.{n + 1}")
                made.append(self("Slice", x, *limits, "axis", channels=half))
            return made
        outs = [f"{name}.a", f"{name}.b"]
        self.nodes.append(helper.make_node("Split", [x], outs, axis=1))
        self._channels |= dict.fromkeys(outs, half)
        return outs

    def join(self, *pieces: str) -> str:
        channels = sum(self._channels[each] for each in pieces)
        return self("Concat", *pieces, channels=channels, axis=1)

    def proto(self, *outputs: str) -> onnx.ModelProto:
        inputs = {"x": (1, 3, SIZE, SIZE)}
        named: Mapping[str, Any] = dict.fromkeys(outputs)
        made = model(self.nodes, inputs=inputs, outputs=named, weights=self.weights)
        return onnx.shape_inference.infer_shapes(made)


def fire(net: Net) -> tuple[str, ...]:
    """A module of SqueezeNet, two times."""
    x = net.conv("x")
    for _ in range(2):
        x = net.conv(x, size=1)
        x = net.join(net.conv(x, size=1), net.conv(x))
    return (net.conv(x),)


def inception(net: Net) -> tuple[str, ...]:
    """Branches of a convolution, of two, and of a pool."""
    x = net.conv("x")
    pool = net("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    return (net.conv(net.join(net.conv(x, size=1), net.conv(net.conv(x, 8), 24), pool)),)


def nested(net: Net) -> tuple[str, ...]:
    """A dense block, where each layer joins what the one before it joined, as Caffe has it."""
    x = net.conv("x")
    for _ in range(3):
        x = net.join(x, net.conv(net.conv(x, size=1)))
    return (net.conv(x),)


def flat(net: Net) -> tuple[str, ...]:
    """A dense block, where each layer joins all before it anew, as PyTorch has it."""
    features = [net.conv("x")]
    for _ in range(3):
        x = net.join(*features) if len(features) > 1 else features[0]
        features.append(net.conv(net.conv(x, size=1)))
    return (net.conv(net.join(*features)),)


def read_elsewhere(net: Net) -> tuple[str, ...]:
    """A block of a detector: what is joined is also read by itself, as each step reads the last."""
    first = net.conv("x")
    second = net.conv(first)
    third = net("Add", net.conv(second), second)
    return (net.conv(net.join(first, second, third)),)


def skipped(net: Net) -> tuple[str, ...]:
    """The ends of a U: what is upsampled by a convolution joins what was pooled."""
    x = net.conv("x")
    low = net.conv(net("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    net.weights["up"] = floats(16, 16, 2, 2)
    up = net("ConvTranspose", low, "up", channels=16, strides=[2, 2])
    return (net.conv(net.join(net("Relu", up), x)),)


# By name: what joins, and how many concatenations are left out.
LEFT_OUT: dict[str, tuple[Callable[[Net], tuple[str, ...]], int]] = {
    "fire": (fire, 2),
    "inception": (inception, 1),
    "nested": (nested, 3),
    "flat": (flat, 3),
    "read elsewhere": (read_elsewhere, 1),
    "skipped": (skipped, 1),
}


def c2f(net: Net, *, has_shortcuts: bool = True, has_slices: bool = False) -> tuple[str, ...]:
    """A block of YOLOv8: one half goes through two bottlenecks, and all that is made is joined."""
    parts = net.halves(net.conv(net.conv("x"), 32, size=1), has_slices=has_slices)
    for _ in range(2):
        made = net.conv(net.conv(parts[-1]))
        parts.append(net("Add", parts[-1], made) if has_shortcuts else made)
    return (net.conv(net.join(*parts), 32, size=1),)


def shuffled(net: Net) -> tuple[str, ...]:
    """A block of ShuffleNet: a half is computed, and a group's channels are between the other's."""
    first, second = net.halves(net.conv("x", 32))
    x = net.join(first, net.conv(net.conv(second, size=1)))
    shapes = {"groups": (1, 2, 16, SIZE, SIZE), "channels": (1, 32, SIZE, SIZE)}
    net.weights |= {name: np.array(shape) for name, shape in shapes.items()}
    x = net("Transpose", net("Reshape", x, "groups"), perm=[0, 2, 1, 3, 4])
    return (net.conv(net("Reshape", x, "channels", channels=32)),)


def cut_again(net: Net) -> tuple[str, ...]:
    """Halves of halves, which nobody joins."""
    first, second = net.halves(net.conv("x", 32))
    third, fourth = net.halves(second)
    return net.conv(net.conv(first)), net.conv(net.conv(third, 8)), net.conv(fourth)


def cut_and_joined_twice(net: Net) -> tuple[str, ...]:
    """Halves that two concatenations join, one of them with more."""
    parts = net.halves(net.conv("x", 32))
    parts.append(net.conv(parts[0]))
    return (net.conv(net.join(*parts, net.conv(net.join(*parts)))),)


def joined_in_another_order(net: Net) -> tuple[str, ...]:
    first, second = net.halves(net.conv("x", 32))
    return (net.conv(net.join(second, first, net.conv(second))),)


def one_of_two_joined(net: Net) -> tuple[str, ...]:
    first, second = net.halves(net.conv("x", 32))
    return (net.conv(net.join(second, net.conv(first))),)


# By name: what cuts, how many kernels that cut are left out, and how many that join.
CUT: dict[str, tuple[Callable[[Net], tuple[str, ...]], int, int]] = {
    "C2f": (c2f, 1, 1),
    "C2f without shortcuts": (partial(c2f, has_shortcuts=False), 1, 1),
    "C2f of slices": (partial(c2f, has_slices=True), 1, 1),
    "shuffled": (shuffled, 1, 0),
    "cut again": (cut_again, 2, 0),
    "cut and joined twice": (cut_and_joined_twice, 1, 2),
    "joined in another order": (joined_in_another_order, 1, 0),
    "one of two joined": (one_of_two_joined, 1, 0),
}


def of_an_input(net: Net) -> tuple[str, ...]:
    net.nodes.append(helper.make_node("Concat", ["x", net.conv("x")], ["joined"], axis=1))
    net._channels["joined"] = 19
    return (net.conv("joined"),)


def of_an_output(net: Net) -> tuple[str, ...]:
    first, second = net.linear("x"), net.linear("x")
    return net.linear(net("Concat", first, second, axis=3), depth=64), first


def that_is_an_output(net: Net) -> tuple[str, ...]:
    return (net("Concat", net.linear("x"), net.linear("x"), axis=3),)


def of_one_twice(net: Net) -> tuple[str, ...]:
    x = net.conv("x")
    return (net.conv(net.join(x, x)),)


def of_channels_that_are_not_aligned(net: Net) -> tuple[str, ...]:
    x = net.conv("x")
    return (net.conv(net.join(net.conv(x, 5), net.conv(x, 6))),)


def cut_out_of_an_input(net: Net) -> tuple[str, ...]:
    net.weights |= {"from": np.array([0]), "to": np.array([2]), "axis": np.array([1])}
    part = net("Slice", "x", "from", "to", "axis", channels=2)
    return net("MaxPool", part, kernel_shape=[2, 2]), net.linear(part)


def cut_into_an_output(net: Net) -> tuple[str, ...]:
    x = net.linear("x")
    net.weights |= {"from": np.array([0]), "to": np.array([16]), "axis": np.array([3])}
    part = net("Slice", x, "from", "to", "axis")
    return net.linear(part, depth=16), part


def cut_into_pieces_that_are_not_aligned(net: Net) -> tuple[str, ...]:
    first, second = net.halves(net.conv("x", 12))
    return net.conv(first), net.conv(second)


STAYS = [of_an_input, of_an_output, that_is_an_output, of_one_twice]
STAYS += [of_channels_that_are_not_aligned, cut_out_of_an_input, cut_into_an_output]
STAYS += [cut_into_pieces_that_are_not_aligned]


def loaded(tmp_path: Path, form: Callable[[Net], tuple[str, ...]]) -> Model:
    net = Net()
    return load(tmp_path, net.proto(*form(net)))


def joining(lowered: Lowered) -> set[str]:
    """Return the kernels that do nothing but join."""
    names = {v.name_hint for v, _ in lowered.mod.functions_items()}
    return {name for name in names if name.startswith("concatenate")}


def calls(mod: IRModule) -> int:
    return str(mod["main"].script()).count("R.call_tir")


def left(lowered: Lowered, tasks: tuple[Task, ...], target: TargetSpec) -> set[str]:
    """Return those that the scheduled model calls."""
    made = schedule(lowered.mod, tasks, {}, target).mod
    return joining(lowered) & {v.name_hint for v, _ in made.functions_items()}


def require_right(folder: Path, of: Model) -> None:
    session = tunerd.load(folder)
    for seed in (0, 1):
        feed = random_inputs(of.inputs, seed)
        found = session(*feed.values())
        for name, expected in Reference(of.graph.proto).run(feed).items():
            assert agree(found[name], expected, rtol=1e-3)


def compiled(
    folder: Path, of: Model, target: TargetSpec, winners: dict[str, Candidate]
) -> dict[str, Any]:
    lowered = lower(of, target)
    tasks = extract_tasks(lowered, target, precision=of.precision)
    compile_artifact(lowered, tasks, winners, target, folder, model=of, pct=50)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert isinstance(manifest, dict)
    return manifest


def proposed(tasks: tuple[Task, ...], name: str, *, splits: bool = False) -> dict[str, Candidate]:
    """Return a candidate of each task that a source takes."""
    source = registry.SOURCES[name]
    search = source.search(SearchSettings(seed=0, threads=1, sms=12))
    found = {}
    for task in tasks:
        if source.takes(task) is None:
            candidates = list(search.propose(task, 60 if splits else 1).candidates)
            if splits:
                candidates.sort(key=lambda each: -int(json.loads(each.recipe)["splits"]))
            found[task.task_id] = candidates[0]
    return found


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_model_without_its_concatenations_agrees_with_onnx_runtime(
    tmp_path: Path, name: str
) -> None:
    form, count = LEFT_OUT[name]
    of = loaded(tmp_path, form)
    lowered = lower(of, LLVM)
    tasks = extract_tasks(lowered, LLVM)
    assert joining(lowered)
    assert len(joins_of(lowered.mod).joined) == count
    assert not [task.name for task in tasks if task.name.startswith("concatenate")]
    assert not left(lowered, tasks, LLVM)
    compiled(tmp_path / "a", of, LLVM, {})
    require_right(tmp_path / "a", of)


@pytest.mark.parametrize("name", CUT)
def test_a_model_without_its_splits_agrees_with_onnx_runtime(tmp_path: Path, name: str) -> None:
    form, cuts, joined = CUT[name]
    of = loaded(tmp_path, form)
    lowered = lower(of, LLVM)
    found = joins_of(lowered.mod)
    assert len(found.joined) == joined
    left = calls(in_place(lowered.mod, found).mod)
    assert left == calls(lowered.mod) - cuts - joined
    assert left == sum(task.weight for task in extract_tasks(lowered, LLVM))
    compiled(tmp_path / "a", of, LLVM, {})
    require_right(tmp_path / "a", of)


@pytest.mark.parametrize("source", [METASCHEDULE, FMA])
@pytest.mark.parametrize("name", ["fire", "nested", "C2f", "cut again"])
def test_a_winner_reaches_into_roots_by_its_own_schedule(
    tmp_path: Path, name: str, source: str
) -> None:
    target = cpu_target_json(2) if source == FMA else LLVM
    of = loaded(tmp_path, (LEFT_OUT | CUT)[name][0])
    lowered = lower(of, target)
    tasks = extract_tasks(lowered, target)
    winners = proposed(tasks, source)
    scheduled = schedule(lowered.mod, tasks, winners, target)
    assert min(scheduled.hits[task_id] for task_id in winners) > 0
    assert not joining(lowered) & {v.name_hint for v, _ in scheduled.mod.functions_items()}
    compiled(tmp_path / "a", of, target, winners)
    require_right(tmp_path / "a", of)


def test_a_model_is_scheduled_several_times_at_once(tmp_path: Path) -> None:
    """As at the end of a run: with the winners, and with default schedules."""
    lowered = lower(loaded(tmp_path, nested), LLVM)
    tasks = extract_tasks(lowered, LLVM)
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(schedule, lowered.mod, tasks, {}, LLVM) for _ in range(8)]
    counts = {len(each.result().mod.functions_items()) for each in made}
    assert len(counts) == 1


@pytest.mark.parametrize("form", STAYS)
def test_a_concatenation_stays_that_something_else_needs(
    tmp_path: Path, form: Callable[[Net], tuple[str, ...]]
) -> None:
    of = loaded(tmp_path, form)
    lowered = lower(of, LLVM)
    assert not joins_of(lowered.mod).left_out
    compiled(tmp_path / "a", of, LLVM, {})
    require_right(tmp_path / "a", of)


def test_a_concatenation_stays_around_a_kernel_without_a_schedule_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = loaded(tmp_path, fire)
    lowered = lower(of, LLVM)
    tasks = extract_tasks(lowered, LLVM)
    known, usual = {task.task_id for task in tasks}, registry.lower

    def refusing(task: Task, *given: Any) -> Any:
        if task.task_id not in known:
            raise ValueError("it reaches into a larger tensor")
        return usual(task, *given)

    monkeypatch.setattr(registry, "lower", refusing)
    winners = proposed(tasks, METASCHEDULE)
    scheduled = schedule(lowered.mod, tasks, winners, LLVM)
    assert joining(lowered) <= {v.name_hint for v, _ in scheduled.mod.functions_items()}
    compiled(tmp_path / "a", of, LLVM, winners)
    require_right(tmp_path / "a", of)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_model_for_tenants_keeps_its_concatenations(tmp_path: Path, lanes: int) -> None:
    lowered = lower(loaded(tmp_path, fire), LLVM)
    tasks = extract_tasks(lowered, LLVM, tenants=lanes)
    assert joining(lowered) <= {task.name for task in tasks}
    made = schedule(lowered.mod, tasks, {}, LLVM, tenants=lanes).mod
    assert joining(lowered) <= {v.name_hint for v, _ in made.functions_items()}


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEFT_OUT)
def test_16_bits_between_kernels_leave_out_the_same(tmp_path: Path, name: str) -> None:
    """Also of few values, which are kept in fp32 elsewhere."""
    form, count = LEFT_OUT[name]
    of = replace(loaded(tmp_path, form), precision="fp16")
    assert len(joins_of(lower(of, CUDA).mod).joined) == count


@pytest.mark.parametrize("name", CUT)
def test_16_bits_between_kernels_leave_out_the_same_splits(tmp_path: Path, name: str) -> None:
    """Pieces are stored as what they are cut out of."""
    form, cuts, joined = CUT[name]
    of = replace(loaded(tmp_path, form), precision="fp16")
    mod = lower(of, CUDA).mod
    found = joins_of(mod)
    assert len(found.joined) == joined
    assert calls(in_place(mod, found).mod) == calls(mod) - cuts - joined


def test_few_values_that_are_joined_are_rounded_where_they_are_made(tmp_path: Path) -> None:
    def small(net: Net) -> tuple[str, ...]:
        x = net.conv("x")
        return (net.conv(net.join(net.conv(x, 8), net.conv(x, 24))),)

    of = replace(loaded(tmp_path, small), precision="fp16")
    lowered = lower(of, CUDA)
    (joined,) = joins_of(lowered.mod).joined
    assert joined.ty.dtype == "float16"  # 20 * 20 * 8 values are few, and all 12,800 are not


@needs_cuda
@pytest.mark.parametrize("name", ["fire", "flat"])
def test_a_kernel_less_is_launched_for_each(tmp_path: Path, name: str) -> None:
    form, count = LEFT_OUT[name]
    of = replace(loaded(tmp_path, form), precision="fp16")
    calls = sum("call_tir" in line for line in lower(of, CUDA).mod["main"].script().splitlines())
    manifest = compiled(tmp_path / "a", of, CUDA, {})
    assert sum(each["calls"] for each in manifest["launches"]) == calls - count


@needs_cuda
def test_kernels_of_templates_write_in_place_with_their_scratch_memory(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    of = replace(loaded(tmp_path, fire), precision="fp16")
    lowered = lower(of, CUDA)
    tasks = extract_tasks(lowered, CUDA, precision="fp16")
    winners = proposed(tuple(t for t in tasks if "conv2d" in t.name), TRITON, splits=True)
    scheduled = schedule(lowered.mod, tasks, winners, CUDA)
    lines = scheduled.mod["main"].script().splitlines()
    in_place_with_scratch = [n for n in lines if "call_tir_inplace" in n and "counters" in n]
    assert in_place_with_scratch
    manifest = compiled(tmp_path / "a", of, CUDA, winners)
    assert sum(each["calls"] for each in manifest["launches"]) == len(
        [line for line in lines if "call_tir" in line]
    )


@pytest.mark.parametrize("name", ["fire", "nested", "C2f"])
def test_a_template_computes_its_part_and_leaves_the_rest_alone(tmp_path: Path, name: str) -> None:
    tvm = load_tvm()
    of = replace(loaded(tmp_path, (LEFT_OUT | CUT)[name][0]), precision="fp16")
    lowered = lower(of, CUDA)
    placed = in_place(lowered.mod, joins_of(lowered.mod))
    tasks = {task.name: task for task in extract_tasks(lowered, CUDA, precision="fp16")}
    assert placed.made_of
    for own, (before, _) in placed.made_of.items():
        task = like(tasks[before], placed.mod[own])
        templates = templates_of(task)
        assert isinstance(templates, dict), templates
        for template in templates.values():
            cuts = list(template.tiles())
            for cut in random.Random(0).sample(cuts, 2):
                require_agreement(task, template, cut, tvm)
