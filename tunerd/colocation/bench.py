"""Run a plan's load under one policy after the other, and say what each member got."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tunerd.colocation import artifacts
from tunerd.colocation.engine import Engine
from tunerd.colocation.load.arrivals import arrivals_of
from tunerd.colocation.load.energy import EnergyMeter
from tunerd.colocation.load.generator import Observed, run_load
from tunerd.colocation.load.result import LoadResult, attained, late_secs, tenants_of
from tunerd.colocation.plan import Plan, PolicyChoice
from tunerd.colocation.policies import policy_of

Say = Callable[[str], None]


@dataclass(frozen=True)
class Benched:
    """A plan, and what came of its load: samples and result of each policy, in order."""

    plan: Plan
    results: tuple[LoadResult, ...]
    observed: tuple[Observed, ...]


def bench(plan: Plan, policies: Sequence[PolicyChoice], say: Say) -> Benched:
    """Bench a plan under each policy; raises as Engine.start does.

    What can be refused is refused before the first member is loaded.
    """
    choices = tuple(policies) or (plan.policy,)
    for choice in choices:
        policy_of(choice.kind, choice.parameters)
    if plan.load.kind != "closed":
        arrivals_of(plan.members, plan.load)
    found = [_under(plan.model_copy(update={"policy": choice}), say) for choice in choices]
    return Benched(plan, tuple(r for r, _ in found), tuple(o for _, o in found))


def _under(plan: Plan, say: Say) -> tuple[LoadResult, Observed]:
    kind = plan.policy.kind
    with Engine(plan, on_step=lambda what: say(f"{kind}: {what}")) as engine:
        meter = EnergyMeter(engine.gpu_uuid)
        say(f"{kind}: {plan.load.kind} load for {plan.load.duration:g} s")
        inputs = {m.name: artifacts.sample_inputs(m.artifact) for m in plan.members}
        observed = run_load(engine, plan.load, inputs, on_start=meter.start, on_end=meter.stop)
        stats = engine.stats()
        resident = engine.memory_bytes()
    tenants = tenants_of(observed, plan.members)
    attainment, of_admitted = attained(tenants)
    done = sum(tenant.done for tenant in tenants)
    window_secs = observed.window[1] - observed.window[0]
    recovered = [f.recovered_secs for f in stats.faults if f.recovered_secs is not None]
    result = LoadResult(
        policy=stats.policy,
        place=stats.place,
        tenants=tenants,
        window_secs=window_secs,
        per_sec=done / window_secs,
        attainment=attainment,
        of_admitted=of_admitted,
        joules_per_inference=meter.joules / done if meter.joules is not None and done else None,
        late_secs=late_secs(observed),
        planned_bytes={name: member.planned_bytes for name, member in stats.members.items()},
        resident_bytes=resident,
        mismatches=tuple(stats.mismatches),
        faults=len(stats.faults),
        recovered_secs=max(recovered, default=None),
    )
    return result, observed
