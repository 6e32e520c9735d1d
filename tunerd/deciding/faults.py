"""What is measured in turns, where one of it faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tunerd.vocabulary import Build, Failure, Kind, Measurement

Results = list[Measurement | Failure]
log = logging.getLogger(__name__)


def without_cause(
    builds: Sequence[Build], results: Results, measure: Callable[[Sequence[Build]], Results]
) -> Results:
    """Return the results of builds that were measured in turns, none of them another's fault.

    A fault fails everything that is measured in turns with its cause, which nothing names: then
    each is measured alone, and in turns again those that get through it.
    """
    if sum(_is_fault(r) for r in results) < 2:
        return results
    log.warning("a fault ended a comparison; its %d builds are measured alone", len(builds))
    alone = [measure([build])[0] for build in builds]
    sound = [i for i, result in enumerate(alone) if isinstance(result, Measurement)]
    if sound:
        together = measure([builds[i] for i in sound])
        for i, result in zip(sound, together, strict=True):
            alone[i] = result
    return alone


def _is_fault(result: Measurement | Failure) -> bool:
    return isinstance(result, Failure) and result.kind in (Kind.CRASH, Kind.TIMEOUT)
