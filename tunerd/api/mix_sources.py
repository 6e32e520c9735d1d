"""Where a mix's shares, artifacts and points come from: this machine, runs, profiles' folders."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from tunerd.api.run import open_run
from tunerd.colocation.planning.curves import Point, with_ends
from tunerd.colocation.planning.mix import Mix
from tunerd.errors import FolderError, HostError, InputError
from tunerd.libraries.packages import PACKAGES, MissingLibraryError, version, version_text
from tunerd.records.points import MachineKind
from tunerd.stats.rounds import mean_over_rounds
from tunerd.system.text import count_text, reason_of
from tunerd.system.version import __version__

if TYPE_CHECKING:
    from tunerd.studies.bench.artifact import BenchResult
    from tunerd.studies.profile.profile import Profile
    from tunerd.system.host import HostFacts

_HEADROOM = 0.9  # of the memory, as the engine plans it


def shares_of(mix: Mix) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
    """Return the shares that are tried on this machine, and those that are not, and why.

    Of shares that are as many cores the smallest is tried, which leaves most to others.
    """
    from tunerd.studies.profile.plan import plan_shares

    kind = "mps" if mix.device == "cuda" else "cpu"
    try:
        planned = plan_shares(kind, mix.shares)
    except HostError:  # points may come from elsewhere
        return mix.shares, ()
    left_out = list(planned.left_out)
    pct_of: dict[int, int] = {}  # by the number of cores
    for pct, spec in planned.specs:
        count = len(spec.cores)
        if not count:  # of a GPU
            return planned.pcts, planned.left_out
        if (first := pct_of.setdefault(count, pct)) != pct:
            left_out.append((pct, f"it is {count_text(count, 'core')} here, as {first}% is"))
    return tuple(pct_of.values()), tuple(sorted(left_out))


def device_of(mix: Mix) -> str:
    if mix.device == "cpu":
        from tunerd.system import host

        return host.facts().cpu_model
    from tunerd.system.gpus import visible_gpus

    found, _ = visible_gpus()
    return found[0].name if found else "a GPU"


def kind_of_machine(device: Literal["cpu", "cuda"], facts: HostFacts) -> MachineKind | str:
    """Return what points may be shared on; why there is none where it cannot be told."""
    known = dict(facts.packages)
    versions = [f"tunerd {__version__}", f"TVM FFI {known.get('apache-tvm-ffi', 'none')}"]
    if device == "cpu":
        # As many hardware threads may be of fewer cores.
        model = f"{facts.cpu_model}, {len(facts.core_siblings)} cores"
        return MachineKind(model, facts.usable_cores, "", ", ".join(versions))
    if not facts.gpus:
        return facts.no_gpu
    gpu = facts.gpus[0]
    if gpu.mig or gpu.sm_count is None:
        return f"nobody tells how many SMs of {gpu.name} there are here"
    for name, package in PACKAGES.items():
        here = "none"
        with contextlib.suppress(MissingLibraryError):
            here = version_text(version(name))
        versions.append(f"{package.title} {here}")
    return MachineKind(gpu.name, gpu.sm_count, facts.driver, ", ".join(versions))


def memory_of(mix: Mix) -> int | None:
    """Return the memory that seats may take; None where nobody can tell."""
    if mix.memory_gib is not None:
        return int(mix.memory_gib * (1 << 30))
    if mix.device == "cpu":
        from tunerd.system import cores

        return int(cores.memory_bytes() * _HEADROOM)
    from tunerd.system.gpus import visible_gpus

    found, _ = visible_gpus()
    return int(found[0].mem_free_bytes * _HEADROOM) if found else None


def whole_artifact(path: Path) -> Path:
    """Return the artifact of a run, or the folder itself, which may be of a tenant's weights alone.

    Raises LoadError where it is neither.
    """
    from tunerd.artifacts.manifest import read_tenant
    from tunerd.records.paths import Paths

    folder = Paths(path).artifact if Paths(path).store.is_file() else path
    read_tenant(folder)
    return folder.absolute()


def finished(out: Path) -> Path | None:
    """Return the artifact of a run that came to its end; None where there is none yet."""
    from tunerd.records.paths import Paths

    if not Paths(out).store.is_file():
        return None
    try:
        run = open_run(out)
        return run.artifact.path.absolute() if run.is_finished else None
    except FolderError:
        return None  # tuning says what is wrong with it


def points_of(found: Profile, of: str, source: str) -> list[Point]:
    (curve,) = found.curves
    return [
        Point(
            of=of,
            share=pct,
            together=1,
            units=point.sm_count,
            secs=with_ends(point.latency),
            tail_secs=max(point.tail.value, point.latency.value),
            source=source,
        )
        for point in curve.points
        for pct in point.pcts
    ]


def point_of_bench(found: BenchResult) -> Point | None:
    """Return what one replica alone took in a bench; None where there was more, or too little."""
    from tunerd.studies.bench.bench import Condition

    rounds = [each for each in found.rounds if each.condition is Condition.ALONE]
    (alone, *others) = found.bench.alone.replicas
    if others or alone.p50_secs is None or alone.p95_secs is None or not rounds:
        return None
    medians = []
    for each in rounds:
        ran = each.trimmed(each.replicas[0])
        pairs = zip(ran.starts, ran.ends, strict=True)
        medians.append(float(np.median([(end - start) / ran.calls for start, end in pairs])))
    secs = with_ends(mean_over_rounds(np.log(np.array(medians))))
    request, proof = found.request, found.proofs[0]
    tail_secs = max(alone.p95_secs, secs.value)
    return Point(request.model, request.pct, 1, proof.sm_count, secs, tail_secs, "tunerd bench")


def points_in(root: Path, of: str) -> list[Point]:
    """Return what a profile's folder holds, of its whole rounds; nothing where there is none."""
    from tunerd.studies.profile.curve import curves, whole_rounds
    from tunerd.studies.profile.folder import ProfileFolder

    folder = ProfileFolder(root)
    rounds = whole_rounds(folder.visits) if folder.visits else 0
    visits = [visit for visit in folder.visits if visit.round <= rounds]
    if not visits:
        return []
    aliases = [(pct, proof.sm_count) for pct, proof in folder.proofs.items()]
    return [
        Point(
            of, pct, 1, point.sm_count, with_ends(point.latency),
            max(point.tail.value, point.latency.value), str(root),
        )
        for curve in curves(visits, aliases)
        for point in curve.points
        for pct in point.pcts
    ]  # fmt: skip


def profiled(root: Path) -> str:
    """Return the digest of what a profile's folder is of."""
    try:
        return str(json.loads((root / "profile.json").read_bytes())["subject"]["digest"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{root} is no profile's folder ({reason_of(error)}); give one, or a file of points"
        ) from None
