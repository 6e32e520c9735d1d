"""Design spaces as numbers: what a choice amounts to is what TVM finds when it applies it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.lib.artifact_fixtures import CUDA
from tests.lib.build_fixtures import LLVM, conv_task, matmul_task, task_of
from tunerd.builder.library import load_tvm
from tunerd.candidates.cost_model import CostModel
from tunerd.candidates.metaschedule.access import accesses_of
from tunerd.candidates.metaschedule.design import FEATURES, Limits, Sketch
from tunerd.candidates.metaschedule.knobs import UNDECIDED, Choices, Location, Tile
from tunerd.candidates.metaschedule.search import Searcher, _Island
from tunerd.vocabulary import TargetSpec, Task

NO_LIMITS = Limits(min_threads=0, max_threads=10**9, shared_bytes=10**12, max_accumulators=10**12)


def opened(task: Task, *, sms: int | None = None) -> _Island:
    return Searcher(seed=0, threads=1, sms=sms)._open(task)


@pytest.fixture(scope="module")
def cuda_conv() -> _Island:
    return opened(conv_task(CUDA))


@pytest.fixture(scope="module")
def llvm_conv() -> _Island:
    return opened(conv_task(LLVM))


@pytest.fixture(params=[CUDA, LLVM], ids=["cuda", "llvm"])
def island(request: pytest.FixtureRequest) -> _Island:
    return opened(conv_task(request.param))


def passes_the_checks(island: _Island, sketch: Sketch, row: Choices) -> bool:
    """Apply a choice and every check that TVM has, its GPU limits too."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(island.mod, seed=1, error_render_level="fast")
    Trace.apply_json_to_schedule(sketch.decode(row), schedule)
    schedule.enter_postproc()
    return all(postproc.apply(schedule) for postproc in island.postprocs)


def random_rows(sketch: Sketch, count: int, seed: int = 0) -> Choices:
    return sketch.sample(count, np.random.default_rng(seed))


# --- knobs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("extent", [1, 7, 56, 1000, 2048])
def test_drawn_tiles_split_their_loop(extent: int) -> None:
    tile = Tile(0, extent, 5, 64)
    rows = tile.sample(200, np.random.default_rng(0))
    assert (rows.prod(axis=1) == extent).all()
    assert (rows[:, -1] <= 64).all()


def test_changed_tiles_still_split_their_loop() -> None:
    tile, random = Tile(0, 1000, 4, 16), np.random.default_rng(0)
    rows = tile.sample(200, random)
    changed = tile.mutate(rows, random)
    assert (changed.prod(axis=1) == 1000).all()
    assert (changed[:, -1] <= 16).all()
    assert (changed != rows).any()


def test_every_split_of_a_loop_is_drawn() -> None:
    rows = Tile(0, 12, 2, 12).sample(500, np.random.default_rng(0))
    assert {tuple(r) for r in rows.tolist()} == {(12 // n, n) for n in (1, 2, 3, 4, 6, 12)}


# --- sketches ----------------------------------------------------------------------------------


def test_a_choice_survives_its_trace(island: _Island) -> None:
    for sketch in island.design.sketches:
        for row in random_rows(sketch, 5):
            decided = np.where(row == UNDECIDED, 2, row)
            assert sketch.encode(sketch.decode(decided)).tolist() == decided.tolist()


def test_an_applied_trace_is_found_among_the_sketches(island: _Island) -> None:
    from tunerd.candidates.metaschedule.drawing import Choice
    from tunerd.candidates.metaschedule.search import _apply

    for sketch in island.design.sketches:
        rows = random_rows(sketch, 3000)
        rows = rows[sketch.fits(rows, island.limits)]
        applied = _apply(island, Choice(sketch.index, rows[0]))
        assert applied is not None
        trace = json.loads(applied[0])
        assert island.design.find(trace) is sketch
        known = rows[0] != UNDECIDED
        assert (sketch.encode(trace)[known] == rows[0][known]).all()


def test_tvm_decides_locations_when_a_trace_is_applied(llvm_conv: _Island) -> None:
    from tunerd.candidates.metaschedule.drawing import Choice
    from tunerd.candidates.metaschedule.search import _apply

    sketch = llvm_conv.design.sketches[0]
    assert any(isinstance(k, Location) for k in sketch.knobs)
    row = random_rows(sketch, 1)[0]
    assert UNDECIDED in row
    applied = _apply(llvm_conv, Choice(sketch.index, row))
    assert applied is not None
    assert UNDECIDED not in sketch.encode(json.loads(applied[0]))


def test_a_trace_of_other_rules_is_not_found(island: _Island) -> None:
    assert island.design.find(([["GetSBlock", [], ["other", "main"], ["b0"]]], [])) is None


# --- what choices amount to --------------------------------------------------------------------


def test_what_fits_passes_tvms_checks(cuda_conv: _Island) -> None:
    for sketch in cuda_conv.design.sketches:
        rows = random_rows(sketch, 4000)
        rows = rows[sketch.fits(rows, cuda_conv.limits)][:20]
        assert len(rows) == 20
        assert all(passes_the_checks(cuda_conv, sketch, row) for row in rows)


def test_a_kernel_with_fewer_outputs_than_a_warp_has_threads_has_candidates() -> None:
    import tvm
    from tvm import te, topi

    with tvm.target.Target(CUDA.json):
        data, weight = te.placeholder((2, 64), name="data"), te.placeholder((64, 5), name="weight")
        island = opened(task_of([data, weight, topi.nn.matmul(data, weight)], CUDA))
    fitting = 0
    for sketch in island.design.sketches:
        rows = random_rows(sketch, 400)
        rows = rows[sketch.fits(rows, island.limits)][:10]
        fitting += len(rows)
        assert all(passes_the_checks(island, sketch, row) for row in rows)
    assert fitting > 10


@pytest.mark.parametrize("limit", ["threads", "shared memory"])
def test_what_does_not_fit_fails_tvms_checks(limit: str) -> None:
    from tunerd.candidates.metaschedule.space import _limits

    target = json.loads(CUDA.json)
    target["max_shared_memory_per_block"] = 2048 if limit == "shared memory" else 10**6
    island = opened(conv_task(TargetSpec("cuda", json.dumps(target))))
    own = dataclasses.replace(_limits(json.dumps(target)), max_accumulators=10**9)
    relaxed = (
        dataclasses.replace(own, min_threads=0, max_threads=10**9)
        if limit == "threads"
        else dataclasses.replace(own, shared_bytes=10**12)
    )
    sketch = island.design.sketches[0]
    rows = random_rows(sketch, 4000)
    rows = rows[sketch.fits(rows, relaxed) & ~sketch.fits(rows, own)][:10]
    assert len(rows) == 10
    assert not any(passes_the_checks(island, sketch, row) for row in rows)


def test_accumulators_that_would_spill_do_not_fit(cuda_conv: _Island) -> None:
    sketch = cuda_conv.design.sketches[0]
    rows = random_rows(sketch, 4000)
    few = sketch.fits(rows, dataclasses.replace(NO_LIMITS, max_accumulators=4))
    assert 0 < few.sum() < sketch.fits(rows, NO_LIMITS).sum()


def written_out(mod: Any) -> int:
    """Return how many updates of the convolution's sums TVM writes one after the other."""
    import tvm

    @tvm.instrument.pass_instrument
    class Keep:
        def run_after_pass(self, mod: Any, info: Any) -> None:
            if info.name == "tirx.UnrollLoop":
                self.mod = mod

    keep = Keep()
    target = tvm.target.Target(LLVM.json)
    with tvm.transform.PassContext(instruments=[keep]), target:
        tvm.tirx.build(mod, target=target)
    lines = "\n".join(f.script() for f in keep.mod.functions.values()).splitlines()
    return sum(line.count("conv2d_nhwc[") == 2 for line in lines)


def test_what_a_cpu_kernel_writes_out_is_counted_beforehand(llvm_conv: _Island) -> None:
    from tunerd.candidates.metaschedule.drawing import Choice
    from tunerd.candidates.metaschedule.search import _apply

    sketch, counts = llvm_conv.design.sketches[0], []
    assert sketch.block is not None
    for row in random_rows(sketch, 12, seed=2):
        applied = _apply(llvm_conv, Choice(sketch.index, row))
        assert applied is not None
        vectors = -(-int(row[sketch._columns[sketch.block.spatial[-1]]][-1]) // 16)
        counts.append(written_out(applied[1]) * vectors)
        for limit in (counts[-1] - 1, counts[-1]):
            fits = sketch.fits(row[None], dataclasses.replace(NO_LIMITS, max_unrolled=limit))
            assert fits.tolist() == [limit == counts[-1]]
    assert len(set(counts)) > 3


def seconds_of(sketch: Sketch, tiles: dict[int, list[int]]) -> float:
    """Return the estimate of a matrix multiplication with these factors of its i, j and k loops."""
    assert sketch.block is not None
    row = np.zeros(sketch.width, dtype=np.int64)
    knobs = (*sketch.block.spatial, *sketch.block.reduction)
    for loop, factors in tiles.items():
        row[sketch._columns[knobs[loop]]] = factors
    (secs,) = sketch.estimated_secs(row[None])
    return float(secs)


def test_a_cpu_kernel_is_estimated_by_what_fits_into_registers() -> None:
    # 32 x 48 x 64, in vectors of 16.
    sketches = opened(matmul_task(LLVM)).design.sketches
    sketch = next(s for s in sketches if s.block is not None)
    i, j, k = 0, 1, 2
    good = seconds_of(sketch, {i: [2, 4, 1, 4], j: [1, 1, 1, 48], k: [8, 8]})
    spilled = seconds_of(sketch, {i: [1, 1, 1, 32], j: [1, 1, 1, 48], k: [8, 8]})
    lonely = seconds_of(sketch, {i: [32, 1, 1, 1], j: [3, 1, 1, 16], k: [1, 64]})
    scalar = seconds_of(sketch, {i: [2, 4, 1, 4], j: [6, 8, 1, 1], k: [1, 64]})
    assert good < lonely < scalar
    assert good < spilled


def test_a_tile_touches_its_window_and_no_more_than_the_buffer() -> None:
    load_tvm()
    import tvm

    data, weight, output = accesses_of(tvm.ir.load_json(conv_task().mod_json))["conv2d_nhwc"]
    one = np.ones((1, 7))  # n, y, x, output channel, ky, kx, input channel
    assert data.tile_bytes(one).tolist() == [4]
    window = np.array([[1, 2, 4, 1, 3, 3, 16]], dtype=float)
    assert data.tile_bytes(window).tolist() == [4 * (2 + 2) * (4 + 2) * 16]
    assert weight.tile_bytes(window).tolist() == [4 * 3 * 3 * 16]
    assert output.tile_bytes(window).tolist() == [4 * 2 * 4]
    assert data.tile_bytes(one * 1000).tolist() == [4 * 16 * 16 * 16]


@pytest.mark.parametrize("make", [conv_task, matmul_task])
@pytest.mark.parametrize("target", [CUDA, LLVM], ids=["cuda", "llvm"])
def test_every_sketch_has_features_of_one_width(make: type, target: TargetSpec) -> None:
    for sketch in opened(make(target)).design.sketches:
        features = sketch.features(random_rows(sketch, 20))
        assert features.shape == (20, FEATURES)
        assert not np.isinf(features).any()


def test_the_sms_of_the_share_change_what_a_cost_model_sees() -> None:
    few, many, unknown = (opened(conv_task(CUDA), sms=sms).design for sms in (12, 132, None))
    for on_few, on_many, on_any in zip(few.sketches, many.sketches, unknown.sketches, strict=True):
        rows = random_rows(on_few, 200)
        seen = [sketch.features(rows) for sketch in (on_few, on_many, on_any)]
        unlike = [
            not np.array_equal(*of, equal_nan=True) for of in zip(seen[0].T, seen[1].T, strict=True)
        ]
        (column,) = np.flatnonzero(unlike)  # the estimated time; all others follow from the tiles
        slower = seen[0][:, column] - seen[1][:, column]
        assert (slower >= 0).all()
        assert (
            len(set(slower.round(6))) > 1
        )  # not all by the same: the share may change their order
        assert np.isnan(seen[2][:, column]).all()


# --- the cost model ----------------------------------------------------------------------------


def test_the_cost_model_ranks_what_it_was_not_told(cuda_conv: _Island) -> None:
    from scipy.stats import spearmanr

    sketch = cuda_conv.design.sketches[0]
    rows = random_rows(sketch, 300)
    features = sketch.features(rows)
    threads = sketch._factors(rows, sketch.block.spatial)[:, :, 2].prod(axis=1)  # type: ignore[union-attr]
    secs = 1e-3 * (1 + np.abs(np.log2(threads / 128)))
    model = CostModel(seed=0, threads=1)
    for i, (row, run_secs) in enumerate(zip(features[:200], secs[:200], strict=True)):
        model.tell("task", f"{i}", row, float(run_secs))
    assert spearmanr(model.predict(features[200:]), -secs[200:])[0] > 0.8


def test_failures_score_below_what_ran() -> None:
    model = CostModel(seed=0, threads=1)
    features = np.tile(np.arange(40.0)[:, None] % 2, (1, FEATURES))
    for i, row in enumerate(features):
        model.tell("task", f"{i}", row, None if i % 2 else 1e-3)
    ran, failed = model.predict(features[:2])
    assert ran > failed


def test_the_cost_model_forgets_the_oldest_but_not_how_fast_a_task_was() -> None:
    model = CostModel(seed=0, threads=1)
    row = np.zeros(FEATURES)
    model.tell("task", "best", row, 1e-3)
    for number in range(5000):
        model.tell("task", f"{number}", row, 2e-3)
    assert len(model._results) < 5000
    assert model.told("task") == 5001
    assert model.predict(row[None])[0] == pytest.approx(0.5, abs=0.01)


def test_without_results_all_choices_score_alike() -> None:
    model = CostModel(seed=0, threads=1)
    assert set(model.predict(np.zeros((5, FEATURES))).tolist()) == {0.0}


def test_tasks_of_any_speed_teach_alike() -> None:
    model = CostModel(seed=0, threads=1)
    features = np.tile(np.arange(20.0)[:, None], (1, FEATURES))
    for scale, task_id in ((1e-6, "quick"), (1.0, "slow")):
        for i, row in enumerate(features):
            model.tell(task_id, f"{task_id} {i}", row, scale * (1 + i))
    first, last = model.predict(features[[0, -1]])
    assert first > 0.5 > last
