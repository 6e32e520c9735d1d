"""Visits: one slice after the other works on a device, at one share after the other.

The slices of a round start together, because a start takes longer than a visit, and are idle but
for their own visit. Each round has new ones: what a process got for its life is part of the noise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tunerd.errors import InfrastructureError
from tunerd.runner.work import Ran, Work
from tunerd.slices.base import Slice
from tunerd.studies.bench.replicas import started_at
from tunerd.studies.profile.curve import Visit
from tunerd.studies.profile.folder import ProfileFolder
from tunerd.studies.profile.plan import Shares, order_of
from tunerd.vocabulary import CapProof, Failure

LEAST_REPEATS = 5  # of a visit, however long one takes
_WARM_UP_SECS = 0.2  # a GPU that was idle raises its clock
# After the seconds in which slices start more rises: four profiles of an H200 were up to 12%
# slower on the whole device in the one round that began there, at the same clock.
_FIRST_WARM_UP_SECS = 1.0
_LEAD_SECS = 0.02


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int = 5
    duration_secs: float = 2.0  # of a visit; longer where one takes fewer than LEAST_REPEATS
    seed: int = 0


def measure_shares(
    folder: ProfileFolder,
    shares: Shares,
    artifacts: Mapping[int, Path],
    *,
    effort: Effort,
    say: Callable[[str], None],
) -> None:
    """Make the visits that the folder lacks; each is kept before the next is made.

    `say` is told what comes next, and may raise to stop there. A share that obtains as many SMs as
    another one is visited only until that is known.
    """
    for number in range(1, effort.rounds + 1):
        order = [
            pct
            for pct in order_of(number, shares.pcts, seed=effort.seed)
            if _todo(folder, number, pct, artifacts, seed=effort.seed)
        ]
        if not order:
            continue
        say(f"round {number} of {effort.rounds}: starting {len(order)} slices")
        specs, warm_up_secs = dict(shares.specs), _FIRST_WARM_UP_SECS
        with started_at({pct: specs[pct] for pct in order}) as slices:
            for pct, (_, proof) in slices.items():
                folder.prove(pct, proof)
            for place, (pct, (one, proof)) in enumerate(slices.items(), 1):
                todo = _todo(folder, number, pct, artifacts, seed=effort.seed)
                if todo:
                    say(f"round {number} of {effort.rounds}, share {place} of {len(order)}: {pct}%")
                for batch in todo:
                    visit = _visit(
                        one, proof, batch, artifacts[batch], number, effort, warm_up_secs
                    )
                    warm_up_secs = _WARM_UP_SECS
                    here = replace(one.conditions(), neighbours=0) if one.spec.gpu_uuid else None
                    folder.add(visit, here)


def _todo(
    folder: ProfileFolder, number: int, pct: int, artifacts: Mapping[int, Path], *, seed: int
) -> list[int]:
    """Return the batches that a round lacks at a share, in an order of its own.

    The slice of a share that was never started may find that its SMs were visited already.
    """
    proof = folder.proofs.get(pct)
    done = {
        v.batch
        for v in folder.visits
        if v.round == number and (v.pct == pct or (proof and v.sm_count == proof.sm_count))
    }
    batches = sorted(set(artifacts) - done)
    random.Random(f"{seed} {number} {pct}").shuffle(batches)
    return batches


def _visit(
    one: Slice,
    proof: CapProof,
    batch: int,
    artifact: Path,
    number: int,
    effort: Effort,
    warm_up_secs: float,
) -> Visit:
    once_secs = one.ready(Work(artifact=str(artifact)))
    if isinstance(once_secs, Failure):
        raise InfrastructureError(
            f"batch {batch} does not run at {one.spec.pct}%: {once_secs.message}"
        )
    _repeat(one, min(warm_up_secs, 2 * effort.duration_secs))
    ran = _repeat(one, max(effort.duration_secs, LEAST_REPEATS * once_secs))
    return Visit(
        round=number,
        pct=one.spec.pct,
        sm_count=proof.sm_count,
        batch=batch,
        run_secs=tuple(round(secs, 9) for secs in ran.secs),  # as they are kept
        worked_secs=ran.ends[-1] - ran.starts[0],
    )


def _repeat(one: Slice, secs: float) -> Ran:
    start_at = time.monotonic() + _LEAD_SECS
    one.begin(start_at, start_at + secs)
    ran = one.end()
    if isinstance(ran, Failure):
        raise InfrastructureError(f"{one.spec.slice_id} failed: {ran.message}")
    if not ran.starts:
        raise InfrastructureError(
            f"{one.spec.slice_id} ended no inference in {secs:.2g} s; see what else keeps this "
            "machine busy, or give a longer --duration"
        )
    return ran
