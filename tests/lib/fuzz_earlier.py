"""What a run, a matrix or a profile reads of earlier ones, with changes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.lib.build_fixtures import LLVM, conv_task, matmul_task
from tests.lib.fuzz_mutations import changed_bytes, changed_json, changed_stores
from tests.lib.matrix_samples import FAILED, PROOF, RIGHT, measured
from tests.lib.store_places import proposed
from tunerd.candidates.metaschedule.search import Searcher
from tunerd.errors import TunerdError
from tunerd.records import RunFacts, Store
from tunerd.records.schema import STORE_NAME
from tunerd.report.matrix_page import matrix_page
from tunerd.runs.warm_start import read_warm_starts
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.studies.matrix.folder import MatrixFolder, read
from tunerd.studies.matrix.levels import Cost
from tunerd.studies.matrix.records import (
    ArtifactDone,
    CellDone,
    ContestDone,
    Done,
    LevelDone,
    ModelTimes,
    StageDone,
    line_of,
)
from tunerd.studies.matrix.result import result_from, whole_rounds
from tunerd.studies.profile.curve import Curve, Visit, curves, knee
from tunerd.studies.profile.folder import samples_of
from tunerd.vocabulary import (
    METASCHEDULE,
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Stage,
    Task,
    TensorSpec,
    to_json,
)

# --- transfers -----------------------------------------------------------------------------------


@functools.cache
def _tasks() -> tuple[Task, ...]:
    return conv_task(LLVM), matmul_task(LLVM)


def transfer_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Stores of a run with real tasks and traces; most changes are of what transfers hold."""
    run = folder / "taught"
    if not run.exists():
        run.mkdir()
        facts = RunFacts("net", "d" * 64, LLVM, "CPU X", "cpu", 50, "0.27.0")
        with Store.create_or_open(run, facts=facts) as store:
            store.register_tasks(_tasks())
            for task in _tasks():
                _measure(store, Searcher(seed=5, threads=1).propose(task, 4).candidates)
    whole = (run / STORE_NAME).read_bytes()
    taught = changed_stores([whole], tables=("trials", "tasks"))
    return st.one_of(taught, taught, taught, changed_stores([whole]), changed_bytes([whole]))


def _measure(store: Store, candidates: tuple[Candidate, ...]) -> None:
    ids = proposed(store, candidates)
    store.start(ids, "cpu-0-0")
    measured = [Measurement((1e-3 * (i + 1),), 1, "search-v1", "cpu-0-0", 1) for i in range(9)]
    wrong = Failure(Stage.RUN, Kind.WRONG_ANSWER, "off by one")
    store.finish_all(dict(zip(ids, [*measured[: len(ids) - 1], wrong], strict=True)))


def read_transfers(content: bytes, folder: Path) -> None:
    """Take transfers in, and search; one that says nothing must not stop it."""
    run = folder / "run"
    run.mkdir()
    (run / STORE_NAME).write_bytes(content)
    try:
        earlier = read_warm_starts([run], out=folder / "out", target=LLVM, slice_kind="cpu")
    except TunerdError as error:
        if not str(error).strip():
            raise ValueError("an error without words") from error
        return
    transfers = [transfer for start in earlier for transfer in start.transferred]
    for trace_json, secs in (result for transfer in transfers for result in transfer.results):
        assert isinstance(trace_json, str)
        assert secs is None or 0 < secs < 1e9
    task, _ = _tasks()
    search = Searcher(seed=0, threads=1)
    search.learn(transfers, {task.task_id: task})
    assert search.propose(task, 1).candidates


# --- kept builds -------------------------------------------------------------------------------

_SIZE = struct.Struct("<Q")
_CANDIDATE = Candidate("t", "c" * 16, METASCHEDULE)


def build_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """What is said of a library and the library, either of them changed."""
    library = b"a library"
    args = (TensorSpec("x", (1, 3), "float32"), TensorSpec("w", (3, 3), "float32"))
    digest = hashlib.sha256(library).hexdigest()
    build = Build(_CANDIDATE, library, digest, 0.1, args, (1,), "llvm")
    assert _saved(folder, build).build_of(_CANDIDATE) == build
    said = _path(folder, ".json").read_bytes()

    def joined(told: bytes, content: bytes = library) -> bytes:
        return _SIZE.pack(len(told)) + told + content

    told = changed_json(json.loads(said)).map(lambda value: joined(json.dumps(value).encode()))
    return st.one_of(
        told,
        told,
        changed_bytes([said]).map(joined),
        changed_bytes([library]).map(functools.partial(joined, said)),
    )


def read_build(content: bytes, folder: Path) -> None:
    """Look a build up: what is found is the library, and what is said of it can be used."""
    (size,) = _SIZE.unpack(content[: _SIZE.size])
    told, library = content[_SIZE.size :][:size], content[_SIZE.size + size :]
    _path(folder, ".json").parent.mkdir()
    _path(folder, ".json").write_bytes(told)
    _path(folder, ".so").write_bytes(library)
    found = MatrixFolder(folder).build_of(_CANDIDATE)
    if found is not None:
        assert found.library_sha256 == hashlib.sha256(library).hexdigest()
        assert all(isinstance(size, int) for arg in found.args for size in arg.shape)
        assert all(0 <= i < len(found.args) for i in found.weight_args)
        assert _saved(folder, found).build_of(_CANDIDATE) == found


# --- lines -------------------------------------------------------------------------------------

_SHARES = (50, 100)


def _line_inputs(lines: Sequence[str]) -> st.SearchStrategy[bytes]:
    def joined(values: Any) -> bytes:
        if not isinstance(values, list):
            return json.dumps(values).encode()
        return b"".join(json.dumps(value).encode() + b"\n" for value in values)

    told = changed_json([json.loads(line) for line in lines]).map(joined)
    return st.one_of(told, told, told, changed_bytes(["\n".join((*lines, "")).encode()]))


def matrix_inputs(_: Path) -> st.SearchStrategy[bytes]:
    """done.jsonl of a matrix with a round."""
    cost = Cost(2.0, 1.0, 0.5)
    one = measured(1e-3)
    models = tuple(ModelTimes(**vars(one), tuned_at=pct) for pct in (DEFAULT, *_SHARES))
    results = {"d": one, "c": measured(5e-4), "f": FAILED}
    done: list[Done] = [LevelDone(pct, (), 20, cost, cost) for pct in _SHARES]
    done += [ContestDone(pct, "t", "c", "d", results, PROOF, 7.0) for pct in _SHARES]
    done += [ArtifactDone(pct, RIGHT) for pct in (DEFAULT, *_SHARES)]
    done += [CellDone(0, pct, models, PROOF, 7.0) for pct in _SHARES]
    return _line_inputs([*map(line_of, done), line_of(StageDone("rounds", cost))])


def read_matrix(content: bytes, folder: Path) -> None:
    """Sum up what is there of a matrix."""
    (folder / "done.jsonl").write_bytes(content)
    asked = {"shares": list(_SHARES), "model": {"name": "net"}, "unit": "cpu"}
    asked["settings"] = {"seed": 0}
    with contextlib.suppress(TunerdError):
        kept = read(folder)
        if whole_rounds(kept, set(_SHARES)):
            matrix_page(result_from(kept, {"t": "conv"}, asked))


def profile_inputs(_: Path) -> st.SearchStrategy[bytes]:
    """samples.jsonl of a profile with two shares."""
    lines = [json.dumps({"proof": to_json(PROOF), "pct": pct}) for pct in _SHARES]
    for number in range(3):
        for pct in _SHARES:
            times = tuple(0.1 / pct + 1e-5 * i for i in range(9))
            visit = Visit(number + 1, pct, pct, 1, times, sum(times))
            lines.append(json.dumps({"visit": to_json(visit), "conditions": None}))
    return _line_inputs(lines)


def read_profile(content: bytes, folder: Path) -> None:
    """Find the knee of each curve that is there."""
    found: tuple[Curve, ...] = ()
    with contextlib.suppress(TunerdError):
        samples = samples_of(content, folder / "samples.jsonl")
        with contextlib.suppress(ValueError):  # there are no two shares
            found = curves(samples.visits)
        for curve in found:
            knee(curve, 0.1)


def _saved(folder: Path, build: Build) -> MatrixFolder:
    _path(folder, ".so").parent.mkdir(exist_ok=True)
    kept = MatrixFolder(folder)
    kept.save_build(build)
    return kept


def _path(folder: Path, suffix: str) -> Path:
    return folder / "builds" / f"{_CANDIDATE.candidate_id}{suffix}"
