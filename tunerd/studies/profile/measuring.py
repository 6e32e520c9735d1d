"""Visits: one slice after the other works on a device, at one share after the other.

The slices of a round start together, because a start takes longer than a visit, and are idle but
for their own visit. Each round has new ones: what a process got for its life is part of the noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import InfrastructureError
from tunerd.runner.base import ALONE
from tunerd.runner.load import Load, Repeats
from tunerd.studies.profile.curve import Visit
from tunerd.studies.profile.folder import ProfileFolder
from tunerd.studies.profile.plan import Shares, order_of
from tunerd.studies.timing import StartedSlice, load_in, repeat_together, started_at

LEAST_REPEATS = 5  # of a visit, however long one takes
_WARM_UP_SECS = 0.2  # a GPU that was idle raises its clock
# After the seconds in which slices start more rises: four profiles of an H200 were up to 12%
# slower on the whole device in the one round that began there, at the same clock.
_FIRST_WARM_UP_SECS = 1.0


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
            for pct, one in slices.items():
                folder.prove(pct, one.proof)
            for place, (pct, one) in enumerate(slices.items(), 1):
                todo = _todo(folder, number, pct, artifacts, seed=effort.seed)
                if todo:
                    say(f"round {number} of {effort.rounds}, share {place} of {len(order)}: {pct}%")
                for batch in todo:
                    visit = _visit(one, batch, artifacts[batch], number, effort, warm_up_secs)
                    warm_up_secs = _WARM_UP_SECS
                    is_gpu = one.slice.spec.gpu_uuid is not None
                    folder.add(visit, ALONE.seen_in(one.slice.conditions()) if is_gpu else None)


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
    one: StartedSlice,
    batch: int,
    artifact: Path,
    number: int,
    effort: Effort,
    warm_up_secs: float,
) -> Visit:
    once_secs = load_in(one, Load(artifact=str(artifact)), name=f"batch {batch}")
    _repeat(one, min(warm_up_secs, 2 * effort.duration_secs))
    repeats = _repeat(one, max(effort.duration_secs, LEAST_REPEATS * once_secs))
    return Visit(
        round=number,
        pct=one.pct,
        sm_count=one.proof.sm_count,
        batch=batch,
        run_secs=tuple(round(secs, 9) for secs in repeats.secs),  # as they are kept
        worked_secs=repeats.ends[-1] - repeats.starts[0],
    )


def _repeat(one: StartedSlice, secs: float) -> Repeats:
    (repeats,) = repeat_together([one], secs)
    if not repeats.starts:
        raise InfrastructureError(
            f"{one.slice_id} ended no inference in {secs:.2g} s; see what else keeps this "
            "machine busy, or give a longer --duration"
        )
    return repeats
