"""Convolutions by Winograd's algorithm: which tasks have them, and what each way to cut gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lib.build_fixtures import built
from tests.lib.models import floats
from tests.lib.super_models import require_right_alone_and_beside, two_convolutions
from tunerd.builder.build import build_candidate
from tunerd.builder.library import load_tvm
from tunerd.candidates.base import BATCH, SearchSettings
from tunerd.candidates.registers.source import TEMPLATE, WINOGRAD, FmaSource, Recipe
from tunerd.candidates.registers.winograd import Winograd, WinogradCut
from tunerd.runner.base import Runner
from tunerd.system.cores import cpu_field
from tunerd.system.targets import cpu_target_json
from tunerd.testing.kernels import task_of
from tunerd.testing.sources import ran, ran_in_plain_loops
from tunerd.vocabulary import (
    FMA,
    Candidate,
    Kind,
    TargetSpec,
    Task,
    default_candidate,
)

SOURCE = FmaSource()


def convolution(
    image: tuple[int, int, int, int] = (1, 8, 8, 16),
    filters: tuple[int, ...] = (3, 3, 16, 32),
    *,
    padding: int | Sequence[int] = 1,
    stride: int = 1,
    dilation: int = 1,
    after: str = "",
    weights: tuple[int, ...] = (1,),
    cores: int = 2,
    mcpu: str = "",
) -> Task:
    """Return a convolution with a bias and a ReLU. image: (n, h, w, c)."""
    load_tvm()
    from tvm import te, topi

    data = te.placeholder(image, name="data")
    weight = te.placeholder(filters, name="weight")
    bias = te.placeholder(filters[-1:], name="bias")
    sums = topi.nn.conv2d_nhwc(data, weight, stride, padding, dilation)
    found, given = topi.add(sums, bias), [data, weight, bias]
    if after == "residual":
        given.append(te.placeholder([int(extent) for extent in sums.shape], name="beside"))
        found = topi.add(found, given[-1])
    elif after == "sigmoid":
        found = topi.sigmoid(found)
    elif after == "mean":
        found = topi.transpose(found, (0, 3, 1, 2))
    target = cpu_target_json(cores)
    if mcpu:
        described = {"kind": "llvm", "mcpu": mcpu, "num-cores": cores}
        target = TargetSpec("llvm", json.dumps(described))
    task = task_of([*given, topi.nn.relu(found)], target)
    return replace(task, weight_args=weights)


TASKS: Mapping[str, dict[str, Any]] = {
    "whole tiles": {},
    "parts of tiles": {"image": (1, 7, 9, 16)},
    "several images": {"image": (3, 6, 5, 32), "filters": (3, 3, 32, 16)},
    "no padding": {"image": (1, 9, 8, 16), "padding": 0},
    "padding on two sides": {"image": (1, 9, 7, 16), "padding": (1, 0, 0, 1)},
    "a residual": {"after": "residual"},
    "a function": {"after": "sigmoid"},
    "what is moved behind": {"after": "mean"},
    "half vectors": {"filters": (3, 3, 16, 24), "cores": 1},
    "few rows on three cores": {"image": (1, 4, 24, 16), "cores": 3},
    "AVX2": {"mcpu": "haswell"},
    "one image row": {"image": (1, 1, 12, 16), "cores": 1},
}


def winograd_of(task: Task) -> Winograd:
    templates = SOURCE.templates_of(task)
    assert not isinstance(templates, str), templates
    found = templates[WINOGRAD]
    assert isinstance(found, Winograd)
    return found


def candidate_of(task: Task, cut: WinogradCut) -> Candidate:
    recipe = Recipe(WINOGRAD, cut).text
    return Candidate.of_recipe(task.task_id, recipe, source=FMA)


def some_cuts(of: Winograd) -> list[WinogradCut]:
    """Return for both sizes of tiles the best, and those with most and fewest rows."""
    found: list[WinogradCut] = []
    for outputs in (2, 4):
        cuts = [cut for cut in of.tiles() if cut.outputs == outputs]
        assert cuts
        best = min(cuts, key=lambda cut: of.estimated_secs(cut, 0.0))
        found += {best, min(cuts), max(cuts)}
    return found


@pytest.mark.parametrize("name", TASKS)
def test_each_way_to_cut_computes_what_plain_loops_do(name: str, tmp_path: Path) -> None:
    task = convolution(**TASKS[name])
    if "mcpu" in TASKS[name] and not {"avx2", "fma"} <= {*cpu_field("flags").split()}:
        pytest.skip("no AVX2 or no FMA here")
    right = np.asarray(ran_in_plain_loops(task, tmp_path))
    for number, cut in enumerate(some_cuts(winograd_of(task))):
        folder = tmp_path / str(number)
        folder.mkdir()
        got = ran(built(build_candidate(task, candidate_of(task, cut))), task, folder)
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5 * float(abs(right).max()))


@pytest.mark.parametrize(
    "given",
    [
        {"stride": 2},
        {"dilation": 2, "image": (1, 9, 9, 16)},
        {"filters": (5, 5, 16, 32), "padding": 2},
        {"filters": (1, 3, 16, 32)},
        {"image": (1, 8, 8, 12), "filters": (3, 3, 12, 32)},
        {"weights": (2,)},
    ],
    ids=["stride", "dilation", "5x5", "1x3", "12 channels", "computed filters"],
)
def test_other_convolutions_have_no_such_cut(given: dict[str, Any]) -> None:
    templates = SOURCE.templates_of(convolution(**given))
    assert TEMPLATE in templates
    assert WINOGRAD not in templates


def test_models_that_share_a_launch_have_no_such_cut() -> None:
    assert WINOGRAD not in SOURCE.templates_of(replace(convolution(), tenants=2))


def test_what_serves_several_models_takes_filters_as_each_has_them() -> None:
    task = convolution()
    recipe = candidate_of(task, min(winograd_of(task).tiles())).recipe
    assert SOURCE.lower(task, recipe).layouts
    assert not SOURCE.lower(task, recipe, lanes=1).layouts


def test_large_convolutions_are_tried_so_first() -> None:
    task = convolution((1, 28, 28, 128), (3, 3, 128, 128))
    found = SOURCE.search(SearchSettings(seed=0, threads=1)).propose(task, BATCH)
    assert WINOGRAD in found.candidates[0].recipe


def test_the_estimate_takes_larger_tiles_while_the_filters_are_small() -> None:
    def outputs(size: int, channels: int) -> int:
        found = winograd_of(convolution((1, size, size, channels), (3, 3, channels, channels)))
        return min(found.tiles(), key=lambda cut: found.estimated_secs(cut, 0.0)).outputs

    assert outputs(56, 64) == 4
    assert outputs(7, 512) == 2


def test_no_tile_takes_more_registers_than_there_are() -> None:
    of = winograd_of(convolution())
    assert max(c.rows * c.vectors + c.vectors for c in of.tiles()) <= of.sums.unit.registers


@pytest.mark.parametrize("out", [24, 512], ids=["as they are", "packed"])
def test_it_agrees_with_a_default_whose_filters_are(out: int, cores: Runner) -> None:
    """In AVX2: how wide vectors are decides whether filters are packed."""
    task = convolution(filters=(3, 3, 16, out), mcpu="haswell")
    default = built(build_candidate(task, default_candidate(task)))
    assert bool(default.layouts) is (out == 512)
    cuts = {cut.vectors: cut for cut in winograd_of(task).tiles() if cut.outputs == 2}
    ends = cuts[min(cuts)], cuts[max(cuts)]
    one, two = (built(build_candidate(task, candidate_of(task, cut))) for cut in ends)
    assert cores.agree(default, one) is None
    assert cores.agree(default, two) is None
    failure = cores.agree(default, replace(one, layouts=two.layouts))
    assert failure is not None
    assert failure.kind is Kind.WRONG_ANSWER


def test_a_model_takes_its_filters_transformed(tmp_path: Path) -> None:
    model = two_convolutions(floats(32, 16, 3, 3, seed=1) / 12, floats(16, 32, 3, 3, seed=2) / 17)
    sizes = iter((2, 4))

    def winner_of(task: Task) -> Candidate | None:
        if SOURCE.takes(task) is not None:
            return None
        outputs = next(sizes)
        cuts = winograd_of(task).tiles()
        return candidate_of(task, next(cut for cut in cuts if cut.outputs == outputs))

    manifest = require_right_alone_and_beside(
        model, tmp_path, cpu_target_json(2), winner_of, tolerance=1e-4
    )
    assert {entry["winograd"] for entry in manifest["layouts"].values()} == {2, 4}
    assert {*manifest["layouts"]} == {*manifest["weights"]}  # the filters as they were are gone


@pytest.mark.parametrize("outputs", [2, 4])
def test_filters_that_a_model_computes_are_transformed_in_it(outputs: int) -> None:
    tvm = load_tvm()
    from tvm import relax, topi

    from tunerd.artifacts.device_kernels import with_device_kernels
    from tunerd.candidates.base import module_of
    from tunerd.candidates.default import default_schedule

    task = convolution()
    cut = next(cut for cut in winograd_of(task).tiles() if cut.outputs == outputs)
    kernel = SOURCE.lower(task, candidate_of(task, cut).recipe)
    data, weight, bias, result = task.args
    types = [relax.TensorType(spec.shape, spec.dtype) for spec in (data, weight, bias)]
    params = [relax.Var(spec.name, own) for spec, own in zip(task.args, types, strict=False)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        filters = builder.emit_te(topi.multiply, params[1], relax.const(2.0))
        plain = module_of(task)["main"].without_attr("global_symbol")
        called = builder.add_func(plain, "convolution")
        out = relax.TensorType(result.shape, result.dtype)
        builder.emit_func_output(
            builder.emit(relax.call_tir(called, [params[0], filters, params[2]], out))
        )
    made = with_device_kernels(builder.get(), {called: kernel})
    assert not made.layouts
    target = tvm.target.Target(task.target.json)
    with target:
        executable = tvm.compile(default_schedule(made.mod, target), target)
    machine = relax.VirtualMachine(executable, tvm.cpu())
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(s.shape).astype(s.dtype) for s in (data, weight, bias))
    found = machine["main"](*map(tvm.runtime.tensor, (x, w, b))).numpy()
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    expected = np.maximum(np.einsum("nhwcij,ijck->nhwk", rows, 2 * w) + b, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
