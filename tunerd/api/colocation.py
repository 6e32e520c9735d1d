"""Models that share a device: check a plan, and bench it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from tunerd.api.run import OnStep, StrPath, keeping_nothing, nothing
from tunerd.colocation.bench import Benched
from tunerd.colocation.plan import LoadKind, Plan, PolicyChoice
from tunerd.colocation.regulation.find import RegulatedPlan, regulate
from tunerd.colocation.stats import EngineStats
from tunerd.errors import Interrupted


def colocate_check(
    plan: Plan | StrPath, *, to: StrPath | None = None, on_step: OnStep | None = None
) -> tuple[Plan, EngineStats]:
    """Load all members of a plan, try each, and return the plan with what was proved.

    Args:
        to: write that plan to this file, with the sha256 of each artifact.

    Raises InputError for a plan that cannot be used, LoadError for an artifact that is not the
    plan's, HostError where it does not fit, and InfrastructureError where a member does not run.
    """
    from tunerd.artifacts.manifest import MANIFEST, sha256_of
    from tunerd.colocation.engine import Engine

    given = plan if isinstance(plan, Plan) else Plan.read(os.fspath(plan))
    with without_mismatches(), Engine(given, on_step=on_step) as engine:
        stats = engine.stats()
    members = tuple(
        m.model_copy(update={"sha256": sha256_of(m.artifact / MANIFEST)}) for m in given.members
    )
    proved = given.model_copy(update={"members": members, "proofs": stats.proofs})
    if to is not None:
        proved.write(Path(to))
    return proved, stats


def colocate_bench(
    plan: Plan | StrPath,
    *,
    policies: Sequence[str] = (),
    load: LoadKind | None = None,
    duration_secs: float | None = None,
    out: StrPath | None = None,
    on_step: OnStep | None = None,
) -> Benched:
    """Run a plan's load under one policy after the other; return what each member got.

    Args:
        policies: names; without any the plan's. One that is the plan's has its parameters, others
            have their defaults.
        load, duration_secs: instead of the plan's.
        out: a folder for the page and a document with all samples, written at the end.

    Where two members are always busy in slices of their own (policy `space`, a closed load of two
    rounds at least), and each is alone in turns, what each loses beside the other is kept in the
    run folders of their artifacts, for plans of mixes.

    Raises what `colocate_check` does, and Interrupted after SIGINT or SIGTERM, with nothing kept.
    """
    from tunerd.api.mix_pairs import keep_pairs_of_colocation
    from tunerd.colocation.bench import bench
    from tunerd.report.colocation import write_bench

    given = plan if isinstance(plan, Plan) else Plan.read(os.fspath(plan))
    changes = {"kind": load, "duration": duration_secs}
    said = {key: value for key, value in changes.items() if value is not None}
    if said:
        given = given.with_load(said)
    chosen = [
        given.policy if name == given.policy.kind else PolicyChoice(kind=name) for name in policies
    ]
    say = on_step or nothing
    with without_mismatches(), keeping_nothing(say):
        found = bench(given, chosen, say)
    keep_pairs_of_colocation(found)
    if out is not None:
        write_bench(found, Path(out))
    return found


def colocate_regulate(
    plan: Plan | StrPath,
    *,
    to: StrPath,
    budget_secs: float = 60.0,
    probe_secs: float = 0.5,
    on_step: OnStep | None = None,
) -> RegulatedPlan:
    """Find where a plan's members stop and which parts do not run at once; write what is best.

    The plan that is written has the policy that came off best when all were measured in turns, be
    it regulated or not, and what was measured. All measurements are kept beside it: the same call
    goes on from there.

    Args:
        to: the file of the plan; what was measured is beside it, with `.jsonl` after its name.
        budget_secs: for all of it.
        probe_secs: how long each regulation is measured.

    Raises what `colocate_check` does, and Interrupted after SIGINT or SIGTERM.
    """
    from tunerd.system.signals import Stop

    given = plan if isinstance(plan, Plan) else Plan.read(os.fspath(plan))
    path, say = Path(to), on_step or nothing
    path.parent.mkdir(parents=True, exist_ok=True)
    with without_mismatches(), Stop() as stop:

        def go_on(message: str) -> None:
            if stop.requested:
                raise Interrupted(
                    "stopped on request; what was measured is kept, and the same command goes on"
                )
            say(message)

        found = regulate(
            given,
            budget_secs=budget_secs,
            probe_secs=probe_secs,
            journal=path.with_name(f"{path.name}.jsonl"),
            say=go_on,
        )
    found.plan.write(path)
    return found


@contextlib.contextmanager
def without_mismatches() -> Iterator[None]:
    """Leave warnings out that a share is not that of the tuning, which results say."""
    from tunerd.artifacts.loading import MismatchWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MismatchWarning)
        yield
