"""A plan's members under the best regulation that a budget finds, against what they had before.

The baselines are one after another and streams, and the plan's own policy where that is another.
Who has an objective (`slo_ms`) has it as the bound of the tail; who has none may not have a tail
that is clearly longer than one after another gives it. In the end all are measured anew, in turns,
and the best of them is the plan's policy: a regulation that does not pay is not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunerd.artifacts import loading
from tunerd.artifacts.loading import LoadedModel
from tunerd.colocation.plan import Measured, Plan, PolicyChoice
from tunerd.colocation.regulation import search
from tunerd.colocation.regulation.measure import Busy, EngineMeasurer, in_turns
from tunerd.colocation.regulation.values import Outcome, Regulation
from tunerd.errors import InputError

KIND = "regulated"
_ROUNDS = 3  # of the proof
_TIMES = 1.1  # as long as one after another: what a tail may be without an objective


@dataclass(frozen=True)
class RegulatedPlan:
    """plan: with the best policy, and what was measured of each. tried: regulations."""

    plan: Plan
    tried: int
    bounds_ms: Mapping[str, float]

    @property
    def pays(self) -> bool:
        """Whether a regulation is better than what there was without one."""
        return self.plan.policy.kind == KIND


def regulate(
    plan: Plan,
    *,
    budget_secs: float,
    probe_secs: float,
    journal: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    proof_rounds: int = _ROUNDS,
    open_model: Callable[[Path], LoadedModel] = loading.load,
) -> RegulatedPlan:
    """Find a regulation of a plan's members; raises as Engine.start does.

    Args:
        budget_secs: for all of it, the proof too; what a journal knows costs nothing.
        probe_secs: how long one regulation is measured.
        journal: keeps what was measured, so that another call goes on there.
        proof_rounds: in which what was found is compared with what was there before.
        open_model: loads an artifact for a GPU.
    """
    if len(plan.members) < 2:
        raise InputError("a regulation is between members, and the plan has one; add another")
    ends_at = time.monotonic() + budget_secs
    measurer = EngineMeasurer(plan, probe_secs=probe_secs, journal=journal, open_model=open_model)
    say("trying where each member may stop")
    kernels = measurer.kernels()
    alone = {k.name: sum(k.secs) for k in kernels}
    before = {kind: PolicyChoice(kind=kind) for kind in ("time", "streams")}
    if plan.policy.kind not in (*before, KIND):
        before[plan.policy.kind] = plan.policy
    seen = {}
    for kind, policy in before.items():
        say(f"{kind}: all busy for {probe_secs:g} s")
        seen[kind] = measurer.under(policy)
    bounds = bounds_of(plan, seen["time"])
    count = 0

    def measure(regulation: Regulation) -> Outcome:
        nonlocal count
        policy = _policy(regulation)
        left_secs = ends_at - time.monotonic()
        proof_secs = proof_rounds * (len(before) + 1) * measurer.wall_secs
        if count and not measurer.is_known(policy) and left_secs < proof_secs:
            raise search.OutOfBudget
        count += 1
        found = outcome(measurer.under(policy), alone, bounds)
        say(f"{count}: {search.text_of(regulation, found)}; {max(0.0, left_secs):.0f} s left")
        return found

    found = search.find(kernels, measure, say)
    chosen = before | {KIND: _policy(found.regulation)}
    proved: dict[str, list[Busy]] = {kind: [] for kind in chosen}
    for nth in range(proof_rounds):
        for kind, policy in chosen.items():
            say(f"{kind}: proof, round {nth + 1} of {proof_rounds}")
            proved[kind].append(measurer.under(policy, anew=True))
    busy = {kind: in_turns(rounds) for kind, rounds in proved.items()}
    bounds = bounds_of(plan, busy["time"])
    best = "time"
    for kind in busy:
        if outcome(busy[kind], alone, bounds).is_better_than(outcome(busy[best], alone, bounds)):
            best = kind
    measured = tuple(
        _measured(kind, each, alone, round(proof_rounds * probe_secs, 3))
        for kind, each in busy.items()
    )
    made = plan.model_copy(update={"policy": chosen[best], "measured": measured})
    return RegulatedPlan(made, found.tried, {name: 1e3 * secs for name, secs in bounds.items()})


def bounds_of(plan: Plan, one_by_one: Busy) -> dict[str, float]:
    """Return what the tail of each member may be, in seconds."""
    return {
        m.name: m.slo_ms / 1e3 if m.slo_ms else _TIMES * one_by_one.tail_secs[m.name]
        for m in plan.members
    }


def outcome(busy: Busy, alone: Mapping[str, float], bounds: Mapping[str, float]) -> Outcome:
    """Return what members got as one value.

    Args:
        alone: seconds of a request of each member when nothing else runs.
        bounds: of the tail of each, in seconds.
    """
    excess = max(busy.tail_secs[name] / bound - 1 for name, bound in bounds.items())
    return Outcome(work_of(busy, alone), max(0.0, excess))


def work_of(busy: Busy, alone: Mapping[str, float]) -> float:
    return sum(per_sec * alone[name] for name, per_sec in busy.per_sec.items())


def _policy(regulation: Regulation) -> PolicyChoice:
    return PolicyChoice.model_validate({"kind": KIND} | regulation.parameters())


def _measured(kind: str, busy: Busy, alone: Mapping[str, float], secs: float) -> Measured:
    return Measured(
        policy=kind,
        secs=secs,
        work=round(work_of(busy, alone), 4),
        per_sec={name: round(rate, 2) for name, rate in busy.per_sec.items()},
        p99_ms={name: round(1e3 * tail, 4) for name, tail in busy.tail_secs.items()},
    )
