"""What is measured in turns, where one of it faults."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tunerd.vocabulary import Build, Failure, Measurement

Results = list[Measurement | Failure]
log = logging.getLogger(__name__)


def without_cause(
    builds: Sequence[Build],
    results: Results,
    *,
    alone: Callable[[Build], Measurement | Failure],
    together: Callable[[Sequence[Build]], Results],
) -> Results:
    """Return the results of builds that were measured in turns, none of them another's fault.

    A fault fails everything that is measured in turns with its cause, which nothing names: then
    each is measured alone, and in turns again those that get through it.

    Args:
        alone: measures a build while no other slice of the device works, so that a fault is its.
        together: measures builds in turns, as they were.
    """
    faults = sum(_is_fault(r) for r in results)
    if faults < 2 and all(is_final(r) for r in results):
        return results
    log.warning("a fault ended a comparison; its %d builds are measured alone", len(builds))
    results = [alone(build) for build in builds]
    sound = [i for i, result in enumerate(results) if isinstance(result, Measurement)]
    if sound:
        for i, result in zip(sound, together([builds[i] for i in sound]), strict=True):
            results[i] = result
    return results


def is_final(result: Measurement | Failure) -> bool:
    """Say whether a result is its own build's, and not of a fault that came between."""
    return isinstance(result, Measurement) or result.kind.ends_trial


def _is_fault(result: Measurement | Failure) -> bool:
    return isinstance(result, Failure) and result.kind.is_fault
