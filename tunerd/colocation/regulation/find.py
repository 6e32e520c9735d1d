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
    before = _baselines(plan)
    seen = {}
    for kind, policy in before.items():
        say(f"{kind}: all busy for {probe_secs:g} s")
        seen[kind] = measurer.under(policy)
    proofs = proof_rounds * (len(before) + 1)
    trials = _Trials(measurer, alone, bounds_of(plan, seen["time"]), ends_at, proofs, say)
    found = search.find(kernels, trials.measure, say)
    chosen = before | {KIND: _policy(found.regulation)}
    busy = _proved(measurer, chosen, rounds=proof_rounds, say=say)
    bounds = bounds_of(plan, busy["time"])
    best = _best({kind: outcome(each, alone, bounds) for kind, each in busy.items()})
    secs = round(proof_rounds * probe_secs, 3)
    measured = tuple(_measured(kind, each, alone, secs) for kind, each in busy.items())
    made = plan.model_copy(update={"policy": chosen[best], "measured": measured})
    return RegulatedPlan(made, found.tried, {name: 1e3 * secs for name, secs in bounds.items()})


def _baselines(plan: Plan) -> dict[str, PolicyChoice]:
    """Return the policies by kind to which a regulation is compared."""
    found = {kind: PolicyChoice(kind=kind) for kind in ("time", "streams")}
    if plan.policy.kind not in (*found, KIND):
        found[plan.policy.kind] = plan.policy
    return found


@dataclass
class _Trials:
    """Measures regulations while there is time for one more and for the proof.

    bounds: of each member's tail, in seconds. proofs: how many measurements a proof takes.
    """

    measurer: EngineMeasurer
    alone: Mapping[str, float]
    bounds: Mapping[str, float]
    ends_at: float
    proofs: int
    say: Callable[[str], None]
    count: int = 0

    def measure(self, regulation: Regulation) -> Outcome:
        """Measure one; raises OutOfBudget, but never for the first."""
        policy = _policy(regulation)
        left_secs = self.ends_at - time.monotonic()
        is_short = left_secs < self.proofs * self.measurer.wall_secs
        if self.count and is_short and not self.measurer.is_known(policy):
            raise search.OutOfBudget
        self.count += 1
        found = outcome(self.measurer.under(policy), self.alone, self.bounds)
        text = search.text_of(regulation, found)
        self.say(f"{self.count}: {text}; {max(0.0, left_secs):.0f} s left")
        return found


def _proved(
    measurer: EngineMeasurer,
    policies: Mapping[str, PolicyChoice],
    *,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Busy]:
    """Measure policies anew, in turns, and return what all got under each."""
    proved: dict[str, list[Busy]] = {kind: [] for kind in policies}
    for nth in range(rounds):
        for kind, policy in policies.items():
            say(f"{kind}: proof, round {nth + 1} of {rounds}")
            proved[kind].append(measurer.under(policy, anew=True))
    return {kind: in_turns(each) for kind, each in proved.items()}


def _best(outcomes: Mapping[str, Outcome]) -> str:
    """Return the kind of the best, `time` where no other is better."""
    best = "time"
    for kind, found in outcomes.items():
        if found.is_better_than(outcomes[best]):
            best = kind
    return best


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
