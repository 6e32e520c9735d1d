"""Two sources -> a GateResult: by the samples that runs have stored, or by measuring both now."""

from __future__ import annotations

from collections.abc import Callable

from tunerd.errors import InputError
from tunerd.studies.compare.decide import GateResult, decide, decide_measured, not_comparable
from tunerd.studies.compare.measuring import kind_of, measure_both, require_artifact
from tunerd.studies.compare.sides import Side, differences, load_sides, share_problem


def gate(
    base: str,
    new: str,
    *,
    fail_above: float,
    measure: bool = False,
    gpu_pct: int | None = None,
    cpu_pct: int | None = None,
    say: Callable[[str], None],
) -> GateResult:
    """Judge whether `new` is slower than `base` by more than the fraction `fail_above`.

    Args:
        measure: both now, in turns; artifacts always are.
        gpu_pct: share to measure at; without one, that of the tuning.

    Raises as `load_sides` and `measure_both` do, and InputError for a share that does not fit.
    """
    sides = load_sides(base, new)
    if measure or any(side.timing is None for side in sides):
        return _measured(*sides, gpu_pct, cpu_pct, fail_above, say)
    if gpu_pct is not None or cpu_pct is not None:
        flag = "--gpu-pct" if gpu_pct is not None else "--cpu-pct"
        raise InputError(
            f"{flag} is the share to measure at, and stored samples have theirs; add --measure, "
            "or leave it out"
        )
    return decide(*sides, fail_above=fail_above)


def _measured(
    base: Side,
    new: Side,
    gpu_pct: int | None,
    cpu_pct: int | None,
    fail_above: float,
    say: Callable[[str], None],
) -> GateResult:
    is_cuda = new.target_kind == "cuda"
    given, other = (gpu_pct, cpu_pct) if is_cuda else (cpu_pct, gpu_pct)
    if other is not None:
        flag = "--gpu-pct" if is_cuda else "--cpu-pct"
        raise InputError(
            f"{new.source} is compiled for {new.target_kind}; give its share by {flag}"
        )
    found = list(differences(base, new, measured=True))
    if given is None and (problem := share_problem(base, new)):
        found.append(problem)
    if found:
        return not_comparable(base, new, tuple(found), fail_above=fail_above)
    rounds = measure_both(
        require_artifact(base),
        require_artifact(new),
        kind=kind_of(new),
        pct=given if given is not None else new.pcts[0],
        say=say,
    )
    return decide_measured(base, new, rounds, fail_above=fail_above)
