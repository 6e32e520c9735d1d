"""The levels of a matrix, what its folder keeps, and what it has cost."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.full_disk import full_beyond
from tests.lib.matrix_samples import FAILED, PROOF, RIGHT, measured
from tests.lib.record_samples import FACTS
from tunerd.errors import DiskError, FolderError, InputError
from tunerd.records import Store
from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.settings.studies import MatrixSettings
from tunerd.studies.matrix.asked import asked_of
from tunerd.studies.matrix.claims import DEFAULT, middle_of
from tunerd.studies.matrix.folder import MatrixFolder, opened, read
from tunerd.studies.matrix.levels import UNKNOWN, Cost, Level, cost_of, levels_of, settings_of
from tunerd.studies.matrix.records import (
    ArtifactDone,
    CellDone,
    ContestDone,
    Done,
    LevelDone,
    ModelTimes,
    StageDone,
    done_of,
    line_of,
)
from tunerd.studies.matrix.result import Times, costs_of
from tunerd.vocabulary import (
    METASCHEDULE,
    Activity,
    Build,
    Candidate,
    Failure,
    Kind,
    Layout,
    Phase,
    PhaseTime,
    Span,
    Stage,
    TensorSpec,
)


def secs(value: float) -> Cost:
    return Cost(value, value, value)


def cell(number: int, run_at: int) -> CellDone:
    times = ModelTimes(**vars(measured(1)), tuned_at=100)
    return CellDone(number, run_at, (times,), PROOF, 7.0)


WHOLE: tuple[Done, ...] = (
    LevelDone(50, (), 1000, secs(100), secs(40)),
    LevelDone(100, (50,), 150, secs(10)),
    StageDone("finalists", secs(20)),
    *(ArtifactDone(pct, RIGHT) for pct in (DEFAULT, 50, 100)),
    StageDone("artifacts", secs(60)),
    *(cell(0, pct) for pct in (50, 100)),
    StageDone("rounds", secs(15)),
    *(cell(1, pct) for pct in (50, 100)),
    StageDone("rounds", secs(15)),
)


@given(st.sets(st.integers(1, 100), min_size=1, max_size=8))
def test_levels_begin_in_the_middle_and_learn_from_what_is_done(shares: set[int]) -> None:
    levels = levels_of(sorted(shares))
    assert {x.pct for x in levels} == shares
    assert levels[0].pct == middle_of(sorted(shares))
    done: set[int] = set()
    for level in levels:
        assert set(level.learns_from) <= done
        assert bool(level.learns_from) == bool(done)
        done.add(level.pct)


def test_independent_levels_learn_nothing_and_have_all_trials() -> None:
    base = TuneSettings(
        model=Path("m.onnx"), out=Path("m"), gpu_pct=100, slice_kind="mps", trials=1000
    )
    levels = levels_of([10, 40, 100], independent=True)
    assert [x.pct for x in levels] == [x.pct for x in levels_of([10, 40, 100])]
    for level in levels:
        assert level.learns_from == ()
        alone = settings_of(base, level, [], Path("a"))
        assert (alone.trials, alone.slices, alone.warm_start) == (1000, None, ())


def test_inputs_are_those_of_each_level_and_of_the_folder(tmp_path: Path) -> None:
    settings = MatrixSettings(
        model=Path("m.onnx"),
        shares="10,40",
        slice_kind="cpu",
        inputs=tmp_path / "x.npz",
        values={"sr": 16000.0},
    )
    asked = asked_of(settings)
    level = settings_of(asked.base, Level(40, ()), [], Path("a"))
    assert (level.inputs, level.values) == (settings.inputs, settings.values)
    x, y = ({"x": np.full(3, value, np.float32)} for value in (1, 2))
    assert asked.identity("d", [x]) == asked.identity("d", [{**x}])
    assert asked.identity("d", [x])["samples"] != asked.identity("d", [y])["samples"]
    assert "samples" not in asked.identity("d")


def test_a_precision_is_that_of_each_level_and_of_the_folder() -> None:
    settings = MatrixSettings(
        model=Path("m.onnx"), shares="10,40", slice_kind="cpu", precision="bf16"
    )
    asked = asked_of(settings)
    assert settings_of(asked.base, Level(40, ()), [], Path("a")).precision == "bf16"
    assert asked.base.out == Path("runs/m-bf16-matrix")
    assert asked.identity("d")["settings"]["precision"] == "bf16"
    as_exported = asked_of(settings.model_copy(update={"precision": None}))
    assert "precision" not in as_exported.identity("d")["settings"]


def test_a_later_level_has_a_part_of_the_trials_and_the_first_all_of_them() -> None:
    base = TuneSettings(
        model=Path("m.onnx"), out=Path("m"), gpu_pct=100, slice_kind="mps", trials=1000
    )
    first, second, *_, last = levels_of([10, 25, 40, 50, 75, 100])
    alone = settings_of(base, first, [], Path("a"))
    assert (alone.pct, alone.trials, alone.slices, alone.warm_start) == (40, 1000, None, ())
    later = settings_of(base, second, [Path("a")], Path("b"))
    assert (later.pct, later.trials, later.slices) == (50, 150, 2)
    assert later.warm_start == (Path("a"),)
    assert settings_of(base, last, [Path("a")], Path("c")).pct == 10


def shares_of(text: str) -> tuple[int, ...]:
    return checked(MatrixSettings, {"model": Path("a.onnx"), "shares": text}).shares


@pytest.mark.parametrize("text", ["", "40", "10,,20", "0,50", "50,101", "a,b", "1.5,3", "40,40"])
def test_shares_that_make_no_matrix_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--shares"):
        shares_of(text)


def test_shares_are_put_in_order() -> None:
    assert shares_of("100, 10%,40") == (10, 40, 100)


# --- what is kept ------------------------------------------------------------------------------


def test_what_failed_or_won_at_a_share_is_known_at_the_others(tmp_path: Path) -> None:
    refused = Failure(Stage.RUN, Kind.REFUSED, "too many threads")
    wrong = Failure(Stage.VERIFY, Kind.WRONG_ANSWER, "7 of 9 elements")
    results = {"d": FAILED, "a": FAILED, "b": measured(1), "c": refused, "e": wrong}
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        kept.add(ContestDone(50, "t", "b", "d", results, PROOF, 7.0))
        # Its default is needed at every share, and what is too wide for one may fit another.
        assert kept.failed("t") == {"a": FAILED, "e": wrong}
        assert kept.agreed("t") == {"b"}
        assert kept.failed("another") == {}
        assert kept.agreed("another") == set()


def test_what_is_kept_comes_back_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    results = {"d": measured(1), "a": FAILED}
    lines = [*WHOLE, ContestDone(50, "t", "d", "d", results, PROOF, 7.0)]
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        for line in lines:
            kept.add(line)
    with (tmp_path / "m" / "done.jsonl").open("ab") as file:
        file.write(b'{"kind":"cell","resu')
    with opened(tmp_path / "m", {"shares": [50, 100]}) as kept:
        assert kept.lines == lines
        kept.add(cell(2, 50))
    packed = tmp_path / "packed"
    packed.mkdir()
    content = (tmp_path / "m" / "done.jsonl").read_bytes()
    (packed / "done.jsonl.xz").write_bytes(lzma.compress(content))
    assert read(packed).lines == read(tmp_path / "m").lines == [*lines, cell(2, 50)]


def test_the_folder_of_another_matrix_is_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "m", {"shares": [50, 100]}),
        pytest.raises(FolderError, match=f"is in use by the tunerd with pid {os.getpid()};"),
        opened(tmp_path / "m", {}),
    ):
        pass
    with pytest.raises(FolderError, match="shares"), opened(tmp_path / "m", {"shares": [1, 2]}):
        pass
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").touch()
    with pytest.raises(FolderError, match="holds no matrix"), opened(tmp_path / "x", {}):
        pass


def test_what_finds_no_room_is_not_kept_and_what_follows_is(tmp_path: Path) -> None:
    folder = tmp_path / "m"

    def work() -> None:
        with opened(folder, {}) as kept:
            kept.add(WHOLE[0])
            size_bytes = (folder / "done.jsonl").stat().st_size
            try:
                with full_beyond(size_bytes + 60):
                    kept.add(cell(0, 50))
            finally:  # where slices have closed there may be room again
                kept.add(StageDone("rounds", secs(1)))

    with pytest.raises(DiskError, match="File too large; make room"):
        work()
    with opened(folder, {}) as kept:
        assert kept.lines == [WHOLE[0], StageDone("rounds", secs(1))]
        kept.add(cell(0, 50))
    assert read(folder).lines[-1] == cell(0, 50)


@pytest.mark.parametrize("room_bytes", [1, 20])  # the pid in the lock has none, or the settings
def test_a_matrix_that_found_no_room_to_begin_begins_with_room(
    room_bytes: int, tmp_path: Path
) -> None:
    folder, asked = tmp_path / "m", {"shares": [50, 100]}
    with (
        full_beyond(room_bytes),
        pytest.raises(DiskError, match="File too large; make room"),
        opened(folder, asked),
    ):
        pass
    assert {path.name for path in folder.iterdir()} == {"matrix.lock"}
    (folder / ".matrix.json.part").write_text("{")  # as of a kill
    with opened(folder, asked) as kept:
        assert kept.lines == []


@pytest.mark.parametrize("name", ["file", "file/m", "m" * 300])
def test_a_folder_of_a_matrix_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderError, match=r"cannot be written|is a file, and no folder"),
        opened(tmp_path / name, {}),
    ):
        pass


def test_the_lock_of_a_matrix_writes_to_no_other_file(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (tmp_path / "mine").write_text("mine")
    (folder / "matrix.lock").symlink_to(tmp_path / "mine")
    with pytest.raises(FolderError, match="cannot be written"), opened(folder, {}):
        pass
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_kept_build_whose_bytes_have_changed_is_built_again(tmp_path: Path) -> None:
    candidate = Candidate("t", "c" * 16, METASCHEDULE)
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # of b"hello"
    spec = TensorSpec("x", (1, 3), "float32")
    layout = Layout((3, 1), (1, 0), winograd=2)
    build = Build(candidate, b"hello", digest, 0.1, (spec,), (0,), "llvm", layouts=((0, layout),))
    with opened(tmp_path / "m", {}) as kept:
        kept.save_build(build)
        assert kept.build_of(candidate) == build
        assert kept.build_of(Candidate("u", candidate.candidate_id, METASCHEDULE)) is None
        library = tmp_path / "m" / "builds" / f"{candidate.candidate_id}.so"
        assert library.stat().st_mode & 0o077 == 0
        library.write_bytes(b"other")
        assert kept.build_of(candidate) is None


@pytest.mark.parametrize(
    "changed",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        {"build_secs": "long"},
        {"build_secs": math.nan},
        {"args": [{"name": "x"}]},
        {"args": None},
        {"weight_args": ["first"]},
        {"weight_args": [1]},
        {"weight_args": [-1]},
        {"compiler": None},
    ],
)
def test_a_kept_build_that_cannot_be_read_is_built_again(
    changed: bytes | dict[str, Any], tmp_path: Path
) -> None:
    candidate = Candidate("t", "c" * 16, METASCHEDULE)
    spec = TensorSpec("x", (1, 3), "float32")
    digest = hashlib.sha256(b"hello").hexdigest()
    with opened(tmp_path / "m", {}) as kept:
        kept.save_build(Build(candidate, b"hello", digest, 0.1, (spec,), (0,), "llvm"))
        about = tmp_path / "m" / "builds" / f"{candidate.candidate_id}.json"
        if isinstance(changed, dict):
            changed = json.dumps(json.loads(about.read_bytes()) | changed).encode()
        about.write_bytes(changed)
        assert kept.build_of(candidate) is None


@pytest.mark.parametrize(
    "line",
    [
        *(b"[]", b"{}", b"7", b'{"kind":7}', b"[" * 100_000, b"\xff"),
        *(b'{"kind":"other"}', b'{"kind":"level","pct":50}'),
        b'{"kind":"cost","stage":"other","cost":{"wall_secs":1,"cpu_secs":1}}',
        b'{"kind":"artifact","tuned_at":50,"verification":{"verdict":"fine"}}',
    ],
)
def test_a_line_of_what_has_ended_that_is_none_is_refused(line: bytes, tmp_path: Path) -> None:
    with opened(tmp_path / "m", {}) as kept:
        kept.add(cell(0, 50))
    with (tmp_path / "m" / "done.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(FolderError, match="is damaged"), opened(tmp_path / "m", {}):
        pass


@pytest.mark.parametrize("content", [b"[]", b"7", b"[" * 100_000, b"\xff", b""])
def test_settings_of_a_matrix_that_are_none_are_refused(content: bytes, tmp_path: Path) -> None:
    with opened(tmp_path / "m", {}):
        pass
    (tmp_path / "m" / "matrix.json").write_bytes(content)
    with pytest.raises(FolderError, match="cannot be read"), opened(tmp_path / "m", {}):
        pass


def test_a_matrix_s_folder_is_private_however_it_came_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir(mode=0o755)
    with opened(folder, {}):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    theirs = tmp_path / "x"
    theirs.mkdir(mode=0o755)
    (theirs / "thesis.tex").touch()
    with pytest.raises(FolderError), opened(theirs, {}):
        pass
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755


# --- costs -------------------------------------------------------------------------------------


def kept_lines(*lines: Done) -> MatrixFolder:
    kept = MatrixFolder(Path("none"))
    kept.lines = list(lines)
    return kept


def test_what_all_shares_took_over_one_counts_the_same_on_both_sides() -> None:
    costs = costs_of(kept_lines(*WHOLE))
    assert costs.kernels_over_one == dict.fromkeys(("cpu", "slice", "wall"), Times(90 / 60))
    # One round of the two, as a tune times its model once.
    assert costs.artifacts_over_one["cpu"] == Times(205 / 100)
    assert costs.all == Cost(220, 220, 220)


def test_without_artifacts_what_they_take_cannot_be_told() -> None:
    costs = costs_of(kept_lines(*WHOLE[:5]))
    assert costs.artifacts == UNKNOWN
    assert costs.artifacts_over_one["wall"] == Times(None)
    assert costs.kernels_over_one["wall"] == Times(90 / 60)


def old(line: Done) -> Done:
    """Return a line as it is read from tunerds that counted slices and stages otherwise."""
    told = json.loads(line_of(line))
    told.pop("artifact_cost", None)
    if "cost" in told:
        told["cost"]["slice_secs"] = told["cost"].pop("slice_work_secs")
    if told.get("stage") in ("artifacts", "rounds"):
        told["stage"] = "models"
    return done_of(json.dumps(told))


def test_what_an_older_tunerd_has_kept_is_said_as_far_as_it_can_be_told() -> None:
    costs = costs_of(kept_lines(*map(old, WHOLE)))
    assert costs.artifacts.cpu_secs == 60
    assert costs.rounds.cpu_secs == 30
    assert costs.kernels_over_one["cpu"] == Times(130 / 100, is_least=True)
    assert costs.kernels_over_one["slice"] == costs.artifacts_over_one["slice"] == Times(None)
    assert costs.artifacts_over_one["cpu"] == Times(205 / 100)


def test_time_on_slices_is_that_of_their_work_alone(tmp_path: Path) -> None:
    phases = [(Phase.START, 0, 5), (Phase.SEARCH, 5, 20), (Phase.FINALS, 20, 30)]
    spans = [
        Span("tuner-0", Activity.BUILD, 6, 9, "tuner"),
        Span("a", Activity.MEASURE, 6, 9, "slice", busy_secs=2.0),
        Span("b", Activity.MEASURE, 7, 8, "slice", busy_secs=1.0),
        Span("a", Activity.MEASURE, 25, 29, "slice"),
        Span("a", Activity.MEASURE, 50, 51, "slice"),
    ]
    with Store.create_or_open(tmp_path, facts=FACTS) as kept:
        kept.add_spans(spans)
        for phase, start, end in [*phases, (Phase.MODEL, 30, 60)]:
            kept.add_phase(PhaseTime(phase, start, end, core_busy_secs=((0, 1.0),)))
        assert cost_of(kept) == Cost(60, 4, 8)
        assert cost_of(kept, (Phase.MODEL,)) == Cost(30, 1, 1)
