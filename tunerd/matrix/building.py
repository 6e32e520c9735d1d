"""Candidates to builds, in as many processes as half the cores; each is kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing import get_context

from tunerd import host
from tunerd.build import build_candidate, preload
from tunerd.matrix.kept import Kept
from tunerd.tuner import BUILD_TIMEOUT_SECS
from tunerd.vocabulary import Build, Candidate, Failure, TargetSpec, Task

_FEW = 8  # builds for which other processes, which import TVM first, do not pay


def build_all(
    wanted: Sequence[tuple[Task, Candidate]],
    kept: Kept,
    target: TargetSpec,
    say: Callable[[str], None],
) -> dict[str, Build | Failure]:
    """Return a build of each candidate by its id, those that are on disk without building."""
    found: dict[str, Build | Failure] = {}
    todo = []
    for task, candidate in wanted:
        build = kept.build_of(candidate)
        if build is None:
            todo.append((task, candidate))
        else:
            found[candidate.candidate_id] = build
    if not todo:
        return found
    say(f"building {len(todo)} finalists once for all shares")
    preload(target)
    with _executor(len(todo), target) as executor:
        futures = {executor.submit(_build, t, c): c for t, c in todo}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                result = future.result()
                found[futures[future].candidate_id] = result
                if isinstance(result, Build):
                    kept.save_build(result)
                if number % 50 == 0:
                    say(f"built {number} of {len(todo)} finalists")
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    return found


@contextmanager
def _executor(count: int, target: TargetSpec) -> Iterator[Executor]:
    cores = host.facts().usable_cores
    executor: Executor
    if count <= _FEW or cores < 4:
        executor = ThreadPoolExecutor(cores)
    else:
        executor = ProcessPoolExecutor(
            cores // 2, mp_context=get_context("spawn"), initializer=preload, initargs=(target,)
        )
    with executor:
        yield executor


def _build(task: Task, candidate: Candidate) -> Build | Failure:
    return build_candidate(task, candidate, timeout_secs=BUILD_TIMEOUT_SECS)


def distinct(finalists: Iterable[Candidate]) -> list[Candidate]:
    """Return each candidate once, in order."""
    return list({c.candidate_id: c for c in finalists}.values())
