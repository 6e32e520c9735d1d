"""PyTorch beside the tuned model: what a reader would otherwise run, timed in turns with it.

Each way to run the module is made ready by a request of its own, all in one process at the share of
the quiet slice. One that fails or takes too long is left out, and said; where it took the process
with it, the others are made ready in another one.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunerd.errors import Interrupted, TunerdError
from tunerd.runner.base import TorchModule
from tunerd.runner.pytorch import ways_for
from tunerd.runs.finals.faults import Results
from tunerd.runs.finals.quiet_slice import QuietSlice
from tunerd.runs.finals.selection import Say
from tunerd.system.text import duration_text
from tunerd.vocabulary import MODEL, Failure, Kind, Profile
from tunerd.vocabulary.outcome import COMPILED, EAGER, PYTORCH, TUNED_BESIDE_PYTORCH, Latency

_Found = tuple[tuple[Latency, ...], tuple[str, ...]]
_KEEPS_PROCESS = (Kind.REFUSED, Kind.OUT_OF_MEMORY)


def timed_beside(
    quiet: QuietSlice,
    artifact: str,
    module: TorchModule,
    *,
    limit_secs: float,
    say: Say,
    profile: Profile = MODEL,
) -> _Found:
    """Return the samples of PyTorch's ways and of an artifact, and what is to be said of each way.

    Without any samples where the module cannot be timed. Raises nothing but Interrupted.

    Args:
        limit_secs: for each way to be ready.
    """
    try:
        ready, problems = _prepared(quiet, module, limit_secs, say)
        if EAGER not in ready:
            return (), (f"PyTorch was not timed: {problems[EAGER]}",)
        say("timing PyTorch: in turns with the tuned model")
        results = quiet.compare_with_pytorch(artifact, tuple(ready), profile)
    except Interrupted:
        raise
    except TunerdError as error:
        return (), (f"PyTorch was not timed: {error}",)
    return _told(results, ready, problems)


def _prepared(
    quiet: QuietSlice, module: TorchModule, limit_secs: float, say: Say
) -> tuple[dict[str, str], dict[str, str]]:
    """Return how each way is ready, and why others are not; none where the first one fails."""
    ready: dict[str, str] = {}
    problems: dict[str, str] = {}
    todo = ways_for(module.inputs, tuple(PYTORCH))
    while todo:
        way = todo.pop(0)
        doing = "compiling" if way == COMPILED else PYTORCH[way].removeprefix("PyTorch ")
        say(f"timing PyTorch: {doing}, for {duration_text(limit_secs)} at most")
        made = quiet.prepare_pytorch(way, module, anew=not ready, limit_secs=limit_secs)
        if not isinstance(made, Failure):
            ready[way] = made
            continue
        problems[way] = _problem(made, limit_secs)
        if way == EAGER:  # what it fails for is the others', too
            return {}, problems
        if made.kind not in _KEEPS_PROCESS:
            todo, ready = [*ready, *todo], {}
    return ready, problems


def _problem(failure: Failure, limit_secs: float) -> str:
    if failure.kind is Kind.TIMEOUT:
        took = duration_text(limit_secs)
        return f"it was not ready after {took}; give it more time with --against-limit"
    return failure.message


def _told(results: Results, ready: Mapping[str, str], problems: Mapping[str, str]) -> _Found:
    tuned, *others = results
    if isinstance(tuned, Failure):
        return (), (f"PyTorch was not timed: the tuned model failed beside it: {tuned.message}",)
    said = {way: f"{PYTORCH[way]}: {how}" for way, how in ready.items()}
    latencies = []
    for way, result in zip(ready, others, strict=True):
        if isinstance(result, Failure):
            problems = {**problems, way: result.message}
        else:
            latencies.append(Latency(way, result.run_secs))
    said |= {way: f"{PYTORCH[way]} was not timed: {why}" for way, why in problems.items()}
    if latencies:
        latencies.append(Latency(TUNED_BESIDE_PYTORCH, tuned.run_secs))
    return tuple(latencies), tuple(said[way] for way in PYTORCH if way in said)
