"""What a run or a matrix reads of earlier ones, with changes: lessons of a run, kept builds."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from pathlib import Path

from build_fixtures import LLVM, conv_task, matmul_task
from fuzz_mutations import changed_bytes, changed_json, changed_stores
from hypothesis import strategies as st

from tunerd.errors import TunerdError
from tunerd.matrix.kept import Kept
from tunerd.records import RunFacts, Store
from tunerd.records.schema import STORE_NAME
from tunerd.search import Searcher
from tunerd.vocabulary import (
    Build,
    Candidate,
    Failure,
    Kind,
    Measurement,
    Origin,
    Stage,
    Task,
    TensorSpec,
)
from tunerd.warm_start import read_warm_starts

# --- lessons -----------------------------------------------------------------------------------


@functools.cache
def _tasks() -> tuple[Task, ...]:
    return conv_task(LLVM), matmul_task(LLVM)


def lesson_inputs(folder: Path) -> st.SearchStrategy[bytes]:
    """Stores of a run with real tasks and traces; most changes are of what lessons are made of."""
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
    ids = store.propose(candidates)
    store.start(ids, "cpu-0-0")
    measured = [Measurement((1e-3 * (i + 1),), 1, "search-v1", "cpu-0-0", 1) for i in range(9)]
    wrong = Failure(Stage.RUN, Kind.WRONG_ANSWER, "off by one")
    store.finish_all(dict(zip(ids, [*measured[: len(ids) - 1], wrong], strict=True)))


def read_lessons(content: bytes, folder: Path) -> None:
    """Take lessons in, and search; a lesson that says nothing must not keep the search from it."""
    run = folder / "run"
    run.mkdir()
    (run / STORE_NAME).write_bytes(content)
    try:
        earlier = read_warm_starts([run], out=folder / "out", target=LLVM, slice_kind="cpu")
    except TunerdError as error:
        if not str(error).strip():
            raise ValueError("an error without words") from error
        return
    lessons = [lesson for start in earlier for lesson in start.lessons]
    for trace_json, secs in (result for lesson in lessons for result in lesson.results):
        assert isinstance(trace_json, str)
        assert secs is None or 0 < secs < 1e9
    task, _ = _tasks()
    search = Searcher(seed=0, threads=1)
    search.learn(lessons, {task.task_id: task})
    assert search.propose(task, 1).candidates


# --- kept builds -------------------------------------------------------------------------------

_SIZE = struct.Struct("<Q")
_CANDIDATE = Candidate("t", "c" * 16, Origin.SEARCH)


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
    found = Kept(folder).build_of(_CANDIDATE)
    if found is not None:
        assert found.library_sha256 == hashlib.sha256(library).hexdigest()
        assert all(isinstance(size, int) for arg in found.args for size in arg.shape)
        assert all(0 <= i < len(found.args) for i in found.weight_args)
        assert _saved(folder, found).build_of(_CANDIDATE) == found


def _saved(folder: Path, build: Build) -> Kept:
    _path(folder, ".so").parent.mkdir(exist_ok=True)
    kept = Kept(folder)
    kept.save_build(build)
    return kept


def _path(folder: Path, suffix: str) -> Path:
    return folder / "builds" / f"{_CANDIDATE.candidate_id}{suffix}"
