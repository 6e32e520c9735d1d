"""ONNX Runtime on the cores of the quiet slice, in turns with the tuned model.

On some machines a core is faster for half a minute than for the next: what was timed before or
after would tell that difference. Both have threads that spin for a while after a call, waiting for
the next one: ONNX Runtime's without letting others have the core, so that nothing is timed
meanwhile.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tunerd.errors import InfrastructureError, Interrupted, TunerdError
from tunerd.frontend.onnx.onnx_graph import OnnxGraph
from tunerd.frontend.onnx.reference import Reference
from tunerd.runs.finals.faults import Results
from tunerd.runs.finals.quiet_slice import QuietSlice
from tunerd.system.arrays import verification_inputs
from tunerd.vocabulary import MODEL, Arrays, Failure, Model, Profile
from tunerd.vocabulary.outcome import BY_ONNX_RUNTIME, TUNED_BESIDE_ONNX_RUNTIME, Latency

_TURN = 4  # samples of each in a turn; each turn calls a model a few times before
_MOST_TURNS = 6
_MOST_CALLS = 10_000  # of a sample
_FAR = 2.0  # times as long
_SPIN_SECS = 0.06  # its threads spin for 40 ms (1.32, two cores)


def timed_beside(
    quiet: QuietSlice,
    artifact: str,
    model: Model,
    *,
    cores: Sequence[int],
    sample: Arrays | None = None,
    requests: int = 1,
    profile: Profile = MODEL,
) -> tuple[tuple[Latency, ...], tuple[str, ...]]:
    """Return the samples of ONNX Runtime, fully optimized, and of an artifact, in turns.

    They are few where both are slow; without any, the text says why. ONNX Runtime has a thread for
    each of `cores`, and all of its threads are bound to them; the caller's affinity stays. Raises
    Interrupted, and OSError for cores that this process may not use.

    Args:
        cores: of the quiet slice.
        sample: its inputs; random ones if not given.
        requests: of a launch of the artifact; ONNX Runtime runs as many one after the other.
    """

    def tuned(of: Profile) -> Results:
        return quiet.compare_models((artifact,), of)

    try:
        found = in_turns(
            model, tuned, cores=cores, sample=sample, requests=requests, profile=profile
        )
    except Interrupted:
        raise
    except TunerdError as error:
        return (), (f"ONNX Runtime was not timed: {error}",)
    return found, ()


def in_turns(
    model: Model,
    tuned: Callable[[Profile], Results],
    *,
    cores: Sequence[int],
    sample: Arrays | None = None,
    requests: int = 1,
    profile: Profile = MODEL,
) -> tuple[Latency, ...]:
    """Return what `timed_beside` does; `tuned` times the artifact as a profile says.

    Raises InfrastructureError where the artifact cannot be timed.
    """
    turn = replace(profile, min_samples=_TURN, max_samples=_TURN)
    ours: list[float] = []
    theirs: list[float] = []
    with ThreadPoolExecutor(1, "onnxruntime") as thread:
        session = thread.submit(_Session, model, cores, sample, requests, profile).result()
        ends_at = time.monotonic() + 2 * profile.max_total_secs
        for done in range(min(_MOST_TURNS, math.ceil(profile.max_samples / _TURN))):
            if time.monotonic() >= ends_at and (done > 1 or (done and _is_far(ours, theirs))):
                break
            if len(cores) > 1:
                time.sleep(_SPIN_SECS)
            (result,) = tuned(turn)
            if isinstance(result, Failure):
                raise InfrastructureError(f"the tuned model could not be timed: {result.message}")
            ours += result.run_secs
            theirs += thread.submit(session.turn).result()
    return Latency(BY_ONNX_RUNTIME, tuple(theirs)), Latency(TUNED_BESIDE_ONNX_RUNTIME, tuple(ours))


def _is_far(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether few samples tell who is slower."""
    return min(ours) > _FAR * max(theirs) or min(theirs) > _FAR * max(ours)


class _Session:
    """A session on some cores. All of it happens in one thread, from which others inherit them."""

    def __init__(
        self,
        model: Model,
        cores: Sequence[int],
        sample: Arrays | None,
        requests: int,
        profile: Profile,
    ) -> None:
        graph = model.graph
        assert isinstance(graph, OnnxGraph)  # it runs nothing else
        os.sched_setaffinity(0, cores)
        self._reference = Reference(graph.proto, threads=len(cores), optimize=True, exact=False)
        self._inputs, self._requests = sample or verification_inputs(model.inputs, 0), requests
        self._secs(1)
        once = max(self._secs(1), 1e-7)
        self._calls = min(max(1, math.ceil(profile.min_sample_secs / once)), _MOST_CALLS)

    def turn(self) -> list[float]:
        """Return the samples of a turn."""
        self._secs(1)  # its threads may sleep
        return [self._secs(self._calls) for _ in range(_TURN)]

    def _secs(self, calls: int) -> float:
        started = time.perf_counter()
        for _ in range(calls * self._requests):
            self._reference.run(self._inputs)
        return (time.perf_counter() - started) / calls
