"""Artifacts side by side in the slices of one device, in rounds that begin at one moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunerd.errors import InfrastructureError
from tunerd.studies.bench.bench import Condition, Round
from tunerd.studies.timing import StartedSlice, repeat_together

ROUNDS = 10  # of each condition; the interval of the slow-down is of their medians
_LEAST_REPEATS = 3  # of the slowest work in a round
_TRIES = 5  # of a round: where others keep the cores busy, slices may miss each other


@dataclass(frozen=True)
class Cast:
    """Who runs what: the first replica is alone in turns, too."""

    replicas: tuple[StartedSlice, ...]
    others: tuple[StartedSlice, ...] = ()


def run_rounds(
    cast: Cast,
    *,
    duration_secs: float,
    slowest_secs: float,
    say: Callable[[str], None],
    rounds: int = ROUNDS,
    neighbour_too: bool = False,
) -> list[Round]:
    """Have slices repeat what they have loaded, alone and all together in turns.

    Args:
        duration_secs: of each condition; more where a round would hold too few repeats.
        slowest_secs: of the slowest work's repeat.
        neighbour_too: the first of the others is alone in turns, too.

    Raises InfrastructureError where slices fail, or never get to work at the same time.
    """
    round_secs = max(duration_secs / rounds, _LEAST_REPEATS * slowest_secs)
    with_others = len(cast.replicas) + len(cast.others) > 1
    found = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}, {round_secs:.2g} s each")
        found.append(_usable_round(Condition.ALONE, Cast(cast.replicas[:1]), round_secs))
        if with_others:
            found.append(_usable_round(Condition.BESIDE, cast, round_secs))
        if neighbour_too:
            found.append(_usable_round(Condition.NEIGHBOUR, Cast((), cast.others[:1]), round_secs))
    return found


def _usable_round(condition: Condition, cast: Cast, secs: float) -> Round:
    """Run a round until it tells something, twice as long each time."""
    for _ in range(_TRIES):
        found = _round(condition, cast, secs)
        if not found.problem:
            return found
        secs *= 2
    raise InfrastructureError(
        f"{found.problem}, in a round of {secs / 2:.2g} s; see what else keeps this machine busy, "
        "or give a longer --duration"
    )


def _round(condition: Condition, cast: Cast, secs: float) -> Round:
    repeats = repeat_together((*cast.replicas, *cast.others), secs)
    count = len(cast.replicas)
    return Round(condition, tuple(repeats[:count]), tuple(repeats[count:]))
