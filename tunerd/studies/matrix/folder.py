"""What a matrix keeps on disk: its settings, what was measured as it ended, and builds.

matrix.json            what was asked for; the same command goes on
done.jsonl             a line for each level, contest and cell that has ended, with raw samples
levels/gpu40/          a run folder for each share
builds/ID.so, ID.json  each candidate that was measured again, compiled once for all shares
artifacts/gpu40/       the model with the kernels that win at a share
report.html, report.md, heatmap.svg, matrix-result.json
matrix.lock            pid of the tunerd that works here
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tunerd.errors import FolderError
from tunerd.records import typed
from tunerd.runs.folder import locked, names_in
from tunerd.studies.matrix.records import ContestDone, Done, done_of, line_of
from tunerd.system.files import disk_errors_said, write_whole
from tunerd.system.jsonl import Journal
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Layout, TensorSpec, to_json

FORMAT = 1
_SETTINGS, _LINES, _LOCK = "matrix.json", "done.jsonl", "matrix.lock"
_Done = TypeVar("_Done", bound=Done)


@dataclass(frozen=True)
class _About:
    """What `builds/ID.json` says of the library beside it."""

    task_id: str
    sha256: str
    build_secs: float
    args: tuple[TensorSpec, ...]
    weight_args: tuple[int, ...]
    compiler: str
    layouts: tuple[tuple[int, Layout], ...]


class MatrixFolder:
    """The folder of a matrix that this process works in."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: list[Done] = []
        self._journal = Journal(root / _LINES)

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def level(self, name: str) -> Path:
        return self.root / "levels" / name

    def artifact(self, name: str) -> Path:
        """Return an absolute path: a runner works in another folder."""
        return self.root.resolve() / "artifacts" / name

    def add(self, done: Done) -> None:
        """Keep what has ended; it is on the disk when this returns."""
        self._journal.append(line_of(done))
        self.lines.append(done)

    def of(self, kind: type[_Done]) -> Iterator[_Done]:
        return (line for line in self.lines if isinstance(line, kind))

    def failed(self, task_id: str) -> dict[str, Failure]:
        """Return by id the candidates of a task that failed at a share and would at all others.

        They faulted, or computed something else than the default, which is none of them.
        """
        return {
            candidate_id: result
            for contest in self._contests(task_id)
            for candidate_id, result in contest.results.items()
            if isinstance(result, Failure)
            if result.kind.is_fault or result.kind is Kind.WRONG_ANSWER
            if candidate_id != contest.default
        }

    def agreed(self, task_id: str) -> set[str]:
        """Return the candidates of a task that won at a share, and so computed what it should."""
        return {contest.winner for contest in self._contests(task_id)}

    def _contests(self, task_id: str) -> Iterator[ContestDone]:
        return (contest for contest in self.of(ContestDone) if contest.task_id == task_id)

    def save_build(self, build: Build) -> None:
        folder = self.root / "builds"
        name = build.candidate.candidate_id
        write_whole(folder / f"{name}.so", build.library, mode=0o600)
        about = _About(
            task_id=build.candidate.task_id,
            sha256=build.library_sha256,
            build_secs=build.build_secs,
            args=build.args,
            weight_args=build.weight_args,
            compiler=build.compiler,
            layouts=build.layouts,
        )
        write_whole(folder / f"{name}.json", json.dumps(to_json(about)), mode=0o600)

    def build_of(self, candidate: Candidate) -> Build | None:
        """Return a kept build; None where there is none, or it is not what it was."""
        path = self.root / "builds" / f"{candidate.candidate_id}.json"
        try:
            about = typed.from_json(_About, path.read_text(encoding="utf-8"))
            library = path.with_suffix(".so").read_bytes()
        except (OSError, ValueError):
            return None
        digest = hashlib.sha256(library).hexdigest()
        if digest != about.sha256 or about.task_id != candidate.task_id:
            return None
        is_weight_there = set(about.weight_args) <= set(range(len(about.args)))
        if not is_weight_there or not math.isfinite(about.build_secs):
            return None
        return Build(
            candidate=candidate,
            library=library,
            library_sha256=digest,
            build_secs=about.build_secs,
            args=about.args,
            weight_args=about.weight_args,
            compiler=about.compiler,
            layouts=about.layouts,
        )


@contextmanager
def opened(root: Path, asked: Mapping[str, Any]) -> Iterator[MatrixFolder]:
    """Create a matrix's folder, or go on in the one that is there.

    Raises FolderError where it cannot be written, holds something else or another matrix, or is in
    use by another tunerd, and DiskError where the disk is full or fails, also in the body.
    """
    settings = root / _SETTINGS
    wanted = {"format": FORMAT, **json.loads(json.dumps(asked))}
    with disk_errors_said(root):
        found = names_in(root) - {_LOCK, f".{_SETTINGS}.part"}
        if found and _SETTINGS not in found:
            raise FolderError(f"{root} holds no matrix; name an empty or a new folder")
        with locked(root, name=_LOCK):
            _require_same(settings, wanted)
            for name in ("builds", "levels", "artifacts"):
                (root / name).mkdir(mode=0o700, exist_ok=True)
            yield read(root)


def read(root: Path) -> MatrixFolder:
    """Return what is kept in a folder in which nobody else works; also from a done.jsonl.xz.

    Raises FolderError where a line of it says nothing that can have ended.
    """
    kept = MatrixFolder(root)
    path = root / _LINES
    packed = root / f"{_LINES}.xz"
    try:
        if packed.exists() and not path.exists():
            content = lzma.decompress(packed.read_bytes())
        else:
            content = Journal(path).read()
        kept.lines = [done_of(line.decode()) for line in content.splitlines()]
    except (ValueError, lzma.LZMAError) as error:
        raise FolderError(f"{path} is damaged: {error}; name a new folder") from None
    return kept


def _require_same(path: Path, wanted: dict[str, Any]) -> None:
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1) + "\n", mode=0o600)
        return
    try:
        found = typed.from_json(dict[str, Any], path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FolderError(f"{path} cannot be read: {error}; name a new folder") from None
    differ = sorted(k for k in {*found, *wanted} if found.get(k) != wanted.get(k))
    if differ:
        said = "; ".join(f"{k}: {found.get(k)} there, {wanted.get(k)} asked for" for k in differ)
        raise FolderError(f"{path.parent} holds another matrix ({said}); name a new folder")
