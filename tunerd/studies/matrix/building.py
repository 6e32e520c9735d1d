"""Candidates to builds on the tuners that the levels have left, and winners to artifacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tunerd.artifacts.compile import compile_artifact
from tunerd.cluster.layout import local_layout
from tunerd.frontend.kernels import Kernels
from tunerd.runs.shared import SharedResources
from tunerd.settings import TuneSettings
from tunerd.studies.matrix.claims import DEFAULT, said_of
from tunerd.studies.matrix.folder import MatrixFolder
from tunerd.studies.matrix.records import ContestDone
from tunerd.system import host
from tunerd.vocabulary import Arrays, Build, Candidate, Failure, TargetSpec

_AT_ONCE = 64  # builds, before they are on the disk

Say = Callable[[str], None]


def build_all(
    candidates: Sequence[Candidate],
    kept: MatrixFolder,
    target: TargetSpec,
    base: TuneSettings,
    shared: SharedResources,
    say: Say,
) -> dict[str, Build | Failure]:
    """Return a build of each candidate by its id; those of the levels and on disk are not built."""
    found: dict[str, Build | Failure] = {}
    missing = []
    for candidate in candidates:
        if build := kept.build_of(candidate):
            found[candidate.candidate_id] = build
        elif build := shared.build_of(target, candidate):
            found[candidate.candidate_id] = build
            kept.save_build(build)
        else:
            missing.append(candidate)
    if not missing:
        return found
    say(f"building {len(missing)} finalists once for all shares")
    layout = local_layout(base)
    with shared.cluster(layout, logs=kept.root / "logs") as cluster:
        cluster.start_tuners(layout.tuners, target, base.seed)
        cluster.give_tasks(shared.kernels(target).tasks)
        for start in range(0, len(missing), _AT_ONCE):
            if start:
                say(f"built {start} of {len(missing)} finalists")
            part = missing[start : start + _AT_ONCE]
            for candidate, built in zip(part, cluster.build_all(part), strict=True):
                found[candidate.candidate_id] = built
                if isinstance(built, Build):
                    kept.save_build(built)
    return found


def compile_all(
    paths: Mapping[int, Path],
    candidates: Mapping[str, Candidate],
    kept: MatrixFolder,
    kernels: Kernels,
    target: TargetSpec,
    say: Say,
    *,
    sample: Arrays | None = None,
) -> None:
    """Compile the winners of each share at once: most of it holds no lock of Python's.

    Args:
        paths: of the artifacts, by the share that they are tuned at; `DEFAULT` has no winners.
        candidates: those that contests were between, by id.
        sample: inputs on which the models are timed, instead of random ones.
    """
    contests = list(kept.of(ContestDone))
    proofs = {x.run_at: x.proof for x in contests}

    def compiled(pct: int) -> int:
        winners = {
            line.task_id: candidates[line.winner]
            for line in contests
            if line.run_at == pct and line.winner in candidates
        }
        at = max(proofs) if pct == DEFAULT else pct
        compile_artifact(
            kernels.lowered,
            kernels.tasks,
            winners,
            target,
            paths[pct],
            model=kernels.model,
            pct=at,
            proofs=(proofs[at],),
            sample=sample,
        )
        return pct

    say(f"compiling {len(paths)} models")
    with ThreadPoolExecutor(min(len(paths), host.facts().usable_cores)) as pool:
        futures = [pool.submit(compiled, pct) for pct in paths]
        try:
            for future in as_completed(futures):
                say(f"compiled the model {said_of(future.result())}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
