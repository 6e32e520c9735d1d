"""A profile's folder: what is profiled, and every inference of every visit.

profile.json     what is profiled where; another model or device is refused
samples.jsonl    a line for each share's proof and for each visit, on the disk before the next
artifacts/       the default model, compiled for each batch
report.html      the page
result.json      what --json prints
tunerd.lock      pid of the tunerd that works here
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.errors import FolderError
from tunerd.records import typed
from tunerd.runs.folder import locked, names_in
from tunerd.studies.profile.curve import Visit
from tunerd.system.files import disk_errors_said, write_whole
from tunerd.system.jsonl import Journal
from tunerd.system.text import reason_of
from tunerd.vocabulary import CapProof, Conditions, to_json

_FORMAT = 1
FACTS, SAMPLES, ARTIFACTS, REPORT, RESULT = (
    "profile.json",
    "samples.jsonl",
    "artifacts",
    "report.html",
    "result.json",
)


class ProfileFolder:
    """The folder that this process profiles into, with what earlier ones have measured."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.visits: list[Visit] = []
        self.proofs: dict[int, CapProof] = {}  # by the share asked for
        self._journal = Journal(root / SAMPLES)
        samples = samples_of(self._journal.read(), self._journal.path)
        self.visits += samples.visits
        self.proofs |= samples.proofs

    @classmethod
    @contextmanager
    def opened(cls, root: Path, facts: Mapping[str, Any]) -> Iterator[ProfileFolder]:
        """Create the folder or go on in the one that is there.

        Raises FolderError where it holds something else, a profile of something else, or is in use.
        """
        wanted = {"format_version": _FORMAT, **facts}
        with disk_errors_said(root):
            foreign = names_in(root) - {"tunerd.lock", f".{FACTS}.part"}
            if foreign and not (root / FACTS).is_file():
                raise FolderError(
                    f"{root} holds '{min(foreign)}' and no profile; a profile needs a folder "
                    "that is new, empty or its own: choose another one with --out"
                )
            with locked(root):
                _require_same(root / FACTS, wanted)
                if not (root / FACTS).is_file():
                    write_json(root / FACTS, wanted)
                yield cls(root)

    def prove(self, pct: int, proof: CapProof) -> None:
        """Keep what a share obtained; FolderError where it obtained something else before."""
        before = self.proofs.get(pct)
        if before is None:
            self._append({"proof": to_json(proof), "pct": pct})
            self.proofs[pct] = proof
            return
        if (before.sm_count, before.device) != (proof.sm_count, proof.device):
            raise FolderError(
                f"{pct}% was {before.sm_count} of {before.device} in {self.root}, and is "
                f"{proof.sm_count} of {proof.device} now; profile into another folder with --out"
            )

    def add(self, visit: Visit, conditions: Conditions | None) -> None:
        self._append({"visit": to_json(visit), "conditions": to_json(conditions)})
        self.visits.append(visit)

    def _append(self, line: Mapping[str, Any]) -> None:
        self._journal.append(json.dumps(line))


@dataclass(frozen=True)
class Samples:
    """What the lines of `samples.jsonl` hold."""

    visits: tuple[Visit, ...]
    proofs: Mapping[int, CapProof]  # by the share asked for


def samples_of(content: bytes, path: Path) -> Samples:
    """Read the lines of samples; FolderError, naming `path`, where one is none."""
    visits: list[Visit] = []
    proofs: dict[int, CapProof] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            entry = json.loads(line)
            if "proof" in entry:
                pct = typed.of_kind(int, entry["pct"])
                proofs[pct] = typed.of_kind(CapProof, entry["proof"])
            else:
                visits.append(typed.of_kind(Visit, entry["visit"]))
        except (ValueError, TypeError, KeyError, LookupError) as error:
            raise FolderError(
                f"line {number} of {path} is no sample ({error}); it was changed, so profile "
                "into another folder with --out"
            ) from None
    return Samples(tuple(visits), proofs)


def write_json(path: Path, value: Any) -> None:
    """Write a document in one step, on the disk when this returns."""
    write_whole(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _require_same(path: Path, wanted: Mapping[str, Any]) -> None:
    if not path.is_file():
        return
    try:
        before = dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise FolderError(
            f"{path} cannot be read ({reason_of(error)}); profile into another folder with --out"
        ) from None
    for key, value in json.loads(json.dumps(wanted)).items():
        if before.get(key) != value:
            raise FolderError(
                f"{path.parent} holds a profile with another {key.replace('_', ' ')}: "
                f"{str(before.get(key))[:80]}, and not {str(value)[:80]}; choose another folder "
                "with --out"
            )
