"""A profile from its beginning to its end: compile, visit, and what the visits amount to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.errors import InputError, Interrupted
from tunerd.studies.profile.curve import (
    Curve,
    Point,
    SmallestShare,
    Visit,
    curves,
    knee,
    share_for,
    whole_rounds,
)
from tunerd.studies.profile.folder import ProfileFolder
from tunerd.studies.profile.measuring import Effort, measure_shares
from tunerd.studies.profile.plan import Shares
from tunerd.studies.profile.subject import Subject, artifacts_of
from tunerd.system.signals import Stop
from tunerd.system.version import __version__
from tunerd.vocabulary import CapProof, unit_name

LOSS = 0.1


@dataclass(frozen=True)
class Profile:
    """What a profile found. A batch's knee and its share for a latency go by its number."""

    name: str
    schedules: str
    kind: str
    rounds: int
    loss: float
    slo_secs: float | None
    curves: tuple[Curve, ...]
    knees: tuple[SmallestShare, ...]  # of the curves, in their order
    for_slo: tuple[SmallestShare, ...]  # likewise; empty without a latency to meet
    proofs: tuple[tuple[int, CapProof], ...]  # by the share asked for
    left_out: tuple[tuple[int, str], ...]

    @property
    def unit(self) -> str:
        return unit_name(self.kind)

    @property
    def whole(self) -> CapProof:
        return max((proof for _, proof in self.proofs), key=lambda proof: proof.sm_count)


def profile(
    subject: Subject,
    shares: Shares,
    root: Path,
    *,
    effort: Effort,
    say: Callable[[str], None],
    loss: float = LOSS,
    slo_secs: float | None = None,
) -> Profile:
    """Profile a subject into a folder, or go on there: what it holds is not measured again.

    Raises FolderError, HostError, InputError or InfrastructureError, and Interrupted after Ctrl-C
    or SIGTERM, with what was measured kept.
    """
    if subject.target_kind not in ("", shares.target.kind):
        raise InputError(
            f"{subject.name} is compiled for {subject.target_kind}, and {shares.kind} slices run "
            f"{shares.target.kind}; choose the other of --gpu and --cpu"
        )
    facts = {
        "subject": subject.facts(),
        "slice_kind": shares.kind,
        "device": _device(shares),
        "seed": effort.seed,
        "tunerd_version": __version__,
    }
    with Stop() as stop, ProfileFolder.opened(root, facts) as folder:

        def go_on(message: str) -> None:
            if stop.requested:
                raise Interrupted(
                    "stopped on request; what was measured is kept, and the same command goes on"
                )
            say(message)

        artifacts = artifacts_of(subject, shares.target, root, say=go_on)
        measure_shares(folder, shares, artifacts, effort=effort, say=go_on)
        return summed_up(
            folder, subject, shares, rounds=effort.rounds, loss=loss, slo_secs=slo_secs
        )


def so_far(
    subject: Subject,
    shares: Shares,
    root: Path,
    *,
    loss: float = LOSS,
    slo_secs: float | None = None,
) -> Profile | None:
    """Return what the whole rounds of a profile that was stopped say; None without one."""
    folder = ProfileFolder(root)
    if not folder.proofs.keys() >= set(shares.pcts):
        return None
    rounds = whole_rounds(_asked_for(folder, subject, shares))
    if not rounds:
        return None
    return summed_up(folder, subject, shares, rounds=rounds, loss=loss, slo_secs=slo_secs)


def summed_up(
    folder: ProfileFolder,
    subject: Subject,
    shares: Shares,
    *,
    rounds: int,
    loss: float,
    slo_secs: float | None,
) -> Profile:
    """Return what the visits of a folder say of the shares and batches that are asked for."""
    asked = {pct: folder.proofs[pct] for pct in shares.pcts}
    visits = [v for v in _asked_for(folder, subject, shares) if v.round <= rounds]
    found = curves(visits, [(pct, proof.sm_count) for pct, proof in asked.items()])
    return Profile(
        name=subject.name,
        schedules=subject.schedules,
        kind=shares.kind,
        rounds=rounds,
        loss=loss,
        slo_secs=slo_secs,
        curves=found,
        knees=tuple(knee(curve, loss) for curve in found),
        for_slo=tuple(share_for(curve, slo_secs) for curve in found) if slo_secs else (),
        proofs=tuple(sorted(asked.items())),
        left_out=shares.left_out,
    )


def _asked_for(folder: ProfileFolder, subject: Subject, shares: Shares) -> list[Visit]:
    counts = {folder.proofs[pct].sm_count for pct in shares.pcts}
    return [v for v in folder.visits if v.sm_count in counts and v.batch in subject.batches]


def _device(shares: Shares) -> dict[str, Any]:
    spec = dict(shares.specs)[shares.pcts[-1]]
    return {"gpu": spec.gpu_uuid, "target": shares.target.json}


def at_share(curve: Curve, pct: int) -> Point:
    """Return the point of a share that was asked for; KeyError where it was not."""
    for point in curve.points:
        if pct in point.pcts:
            return point
    raise KeyError(pct)
