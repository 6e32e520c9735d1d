"""The file that says which models and tuning runs are to be placed on which kind of devices.

    version: 1
    devices: gpus              # of each machine: every GPU, and every instance of MIG
    #        {cores: 2}        # or its cores in so many parts
    #        {simulated: 4, memory_gib: 80, units: 132}    # or devices in name alone
    grace: 60s                 # after a placement, in which a shared device gets no further job
    pairs: [pairs.jsonl]       # measured pairs: what the policy `estimated` estimates from
    measured: [placements/tries.jsonl]    # earlier placements: what the same jobs held of a device
    jobs:
      - name: squeezenet
        tune: models/squeezenet.onnx    # a run of `tunerd tune` with these flags
        with: {gpu-pct: 40, budget: 10m}
        memory_gib: 6          # that it needs of a device
      - name: detector
        command: [uvicorn, "app:app"]    # any program that finds its device by itself
        artifact: runs/detector/artifact # what it loads: its memory and its work are known then
        busy: 30%              # the part of a device that it keeps busy alone
        after: 30s             # when it comes

Paths are relative to the file, and absolute once it is read; a command runs in the file's folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tunerd.colocation.artifacts import needed_memory
from tunerd.colocation.documents import JOBS, Part, absolute, read_yaml, validated
from tunerd.colocation.placement.values import Job
from tunerd.colocation.plan import Name
from tunerd.colocation.planning.features import architecture_of, features_of
from tunerd.colocation.planning.pairs import Side
from tunerd.settings import texts

GIB = 1 << 30
# Of a process that loads one artifact: context, kernels, workspaces, as a seat of MPS takes.
CONTEXT_BYTES = 600 << 20
# Of a tuning run that says nothing and was not measured: runners with their contexts, rotating
# weights, finals.
TUNING_BYTES = 8 * GIB
_HEADROOM = 1.1  # over the most that was seen, as one looks every few seconds
_Secs = Annotated[float, BeforeValidator(texts.duration), Field(ge=0, le=86400)]
_Busy = Annotated[float, BeforeValidator(texts.fraction(least="above 0")), Field(gt=0, le=1)]
_Scalar = bool | int | float | str


Work = tuple[str, ...]  # the words of a program, wherever it leaves its results


def work_of(words: Sequence[str]) -> Work:
    """Return what a program does, by its words: a tuning run does the same into any folder."""
    found = list(words)
    if found[:2] == ["tunerd", "tune"] and "--out" in found:
        at = found.index("--out")
        del found[at : at + 2]
    return tuple(found)


class CoresChoice(Part):
    cores: Annotated[int, Field(ge=1, le=1024)]


class SimulatedChoice(Part):
    simulated: Annotated[int, Field(ge=1, le=1024)]
    memory_gib: Annotated[float, Field(gt=0)] = 80.0
    units: Annotated[int, Field(ge=1)] = 132


DevicesChoice = Literal["gpus"] | CoresChoice | SimulatedChoice


class JobEntry(Part):
    """One job: what it runs, and what is known of what it takes."""

    name: Name
    tune: Path | None = None
    options: Annotated[Mapping[str, _Scalar | tuple[_Scalar, ...]], Field(alias="with")] = {}
    command: tuple[str, ...] = ()
    artifact: Path | None = None
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    busy: _Busy = 1.0
    after: _Secs = 0.0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.tune is None) == (not self.command):
            raise ValueError(f"{self.name} needs one of `tune` and `command`")
        if self.options and self.tune is None:
            raise ValueError(f"{self.name} has flags `with`, which are of a `tune`")
        if taken := {"out", "address"} & self.options.keys():
            raise ValueError(f"{self.name} sets {min(taken)}, which the placement says itself")
        if self.command and self.memory_gib is None and self.artifact is None:
            raise ValueError(f"{self.name} needs `memory_gib`, or the `artifact` that it loads")
        return self

    def memory_bytes(self, peaks: Mapping[Work, int]) -> int:
        """Return what it needs of a device. Raises LoadError where the artifact is none.

        peaks: the most that was seen of work, in bytes.
        """
        if self.memory_gib is not None:
            return int(self.memory_gib * GIB)
        if self.artifact is not None:
            return needed_memory(self.artifact).alone_bytes + CONTEXT_BYTES
        peak = peaks.get(work_of(self.words(Path())), 0)
        return int(_HEADROOM * peak) if peak else TUNING_BYTES

    def words(self, out: Path) -> tuple[str, ...]:
        """Return what is run: `tunerd` as the first word is this package.

        out: the job's folder, in which a tuning run leaves its own.
        """
        if self.tune is None:
            return self.command
        words = ["tunerd", "tune", str(self.tune), "--out", str(out / "run")]
        for name, value in self.options.items():
            for each in value if isinstance(value, tuple) else (value,):
                flag = name.replace("_", "-")
                if isinstance(each, bool):
                    words.append(f"--{flag}" if each else f"--no-{flag}")
                else:
                    words += [f"--{flag}", str(each)]
        return tuple(words)

    def job(
        self, units: int, instances: Iterable[str] = (), peaks: Mapping[Work, int] | None = None
    ) -> Job:
        """Return it as the placer takes it.

        Args:
            units: of a device.
            peaks: of memory, by work that was measured.
            instances: of MIG, which tuning runs do not take: their slices are of whole GPUs.
        """
        side = None
        if self.artifact is not None:
            named = features_of(self.artifact).named()
            side = Side(self.name, architecture_of(self.artifact), 100, named)
        not_on = frozenset(instances) if self.tune is not None else frozenset()
        memory_bytes = self.memory_bytes(peaks or {})
        return Job(self.name, memory_bytes, self.busy * units, side, not_on)


class JobFile(Part):
    """Jobs that are to share devices. Paths are absolute once it is read from a file."""

    version: Literal[1] = 1
    devices: DevicesChoice = "gpus"
    grace: _Secs = 60.0
    pairs: tuple[Path, ...] = ()
    measured: tuple[Path, ...] = ()
    jobs: Annotated[tuple[JobEntry, ...], Field(min_length=1, max_length=10_000)]

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [job.name for job in self.jobs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two jobs are called {twice[0]}; give each a name of its own")
        return self

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a file of jobs; InputError says what is wrong in it, and what to do."""
        path = Path(path)
        found = validated(cls, read_yaml(path, JOBS), path, JOBS)
        folder = Path(os.path.abspath(path.parent))

        def moved(given: Path | None) -> Path | None:
            return None if given is None else absolute(given, folder)

        jobs = tuple(
            job.model_copy(update={"tune": moved(job.tune), "artifact": moved(job.artifact)})
            for job in found.jobs
        )
        pairs, measured = (
            tuple(absolute(each, folder) for each in paths)
            for paths in (found.pairs, found.measured)
        )
        return found.model_copy(update={"jobs": jobs, "pairs": pairs, "measured": measured})
