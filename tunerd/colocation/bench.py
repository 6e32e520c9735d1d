"""Run a plan's load under one policy after the other, and say what each member got."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tunerd.colocation import artifacts
from tunerd.colocation.engine import Engine
from tunerd.colocation.groups import groups_of, kernels_of
from tunerd.colocation.load.alone import against_alone
from tunerd.colocation.load.arrivals import arrivals_of
from tunerd.colocation.load.best import Best, best_of
from tunerd.colocation.load.energy import EnergyMeter
from tunerd.colocation.load.generator import Observed, run_load
from tunerd.colocation.load.outage import Breaker, Moments, faulting_inputs, outage_of
from tunerd.colocation.load.resharing import Resharing, changes_of
from tunerd.colocation.load.result import (
    LoadResult,
    attained,
    late_secs,
    tenants_of,
    window_secs_of,
)
from tunerd.colocation.plan import LoadChoice, Plan, PolicyChoice, members_of
from tunerd.colocation.policies import policy_of
from tunerd.errors import HostError
from tunerd.vocabulary import Arrays

Say = Callable[[str], None]

_CAPACITY_SECS = 5.0  # that the capacity is measured, at most
_CAPACITY_CLIENTS = 2  # of each tenant, at least: while one waits, the other is served


@dataclass(frozen=True)
class Rounds:
    """All requests under one policy: of each round those to all, and those to one alone.

    alone: by the member, or the lane, that had its load alone.
    change_secs: how long each change of shares took meanwhile.
    outages: of each round to all, when the outage that its load says began; None: there was none.
    """

    together: tuple[Observed, ...]
    alone: Mapping[str, tuple[Observed, ...]]
    change_secs: tuple[float, ...] = ()
    outages: tuple[Moments | None, ...] = ()


@dataclass(frozen=True)
class Benched:
    """A plan, and what came of its load: samples and result of each policy, in order.

    capacity: requests per second of each member in a closed loop, where the load is a part of it.
    """

    plan: Plan
    results: tuple[LoadResult, ...]
    rounds: tuple[Rounds, ...]
    capacity: Mapping[str, float] | None = None

    @property
    def best(self) -> Best | None:
        """Return which policies met the objectives best; None without an objective, or for one."""
        together = [rounds.together for rounds in self.rounds]
        return best_of(self.results, together, self.plan.members)


def bench(plan: Plan, policies: Sequence[PolicyChoice], say: Say) -> Benched:
    """Bench a plan under each policy; raises as Engine.start does.

    What can be refused is refused before the first member is loaded. Inputs that were to make a
    member fault, and do not, are an InputError as well.
    """
    choices = tuple(policies) or (plan.policy,)
    for choice in choices:
        policy_of(choice.kind, choice.parameters)
    faulting_inputs(plan)
    plan, capacity = rated(plan, say)
    if plan.load.kind != "closed":
        arrivals_of(plan.members, plan.load)
    found = [_under(plan.model_copy(update={"policy": choice}), say) for choice in choices]
    return Benched(plan, tuple(r for r, _ in found), tuple(o for _, o in found), capacity)


def rated(plan: Plan, say: Say) -> tuple[Plan, Mapping[str, float] | None]:
    """Give members the rates that are a part of the capacity, where they have none yet.

    Returns the capacity, too; None where nothing was measured. Raises as Engine.start does.
    """
    part = plan.load.of_capacity
    if part is None or all(m.rate or m.clients for m in plan.members):
        return plan, None
    capacity = _capacity(plan, say)
    members = tuple(
        m if m.clients else m.model_copy(update={"rate": part / 100 * capacity[m.name]})
        for m in plan.members
    )
    return plan.model_copy(update={"members": members}), capacity


def _capacity(plan: Plan, say: Say) -> dict[str, float]:
    """Return the requests per second of each member when all have more than can be served.

    It is measured under the plan's policy and without deadlines. Raises HostError where a member
    got nothing.
    """
    secs = min(plan.load.duration, _CAPACITY_SECS)
    clients = max(_CAPACITY_CLIENTS, plan.load.clients)
    load = LoadChoice(kind="closed", duration=secs, clients=clients)
    members = tuple(m.model_copy(update={"slo_ms": None}) for m in plan.members)
    eager = plan.model_copy(update={"members": members, "load": load})
    with Engine(eager, on_step=lambda what: say(f"capacity: {what}")) as engine:
        say(f"capacity: closed load for {secs:g} s under {plan.policy.kind}")
        observed = run_load(engine, load, sample_inputs(plan))
    found = dict.fromkeys((m.name for m in members), 0.0)
    for tenant in tenants_of([observed], members):
        found[tenant.member] += tenant.per_sec
    for name, per_sec in found.items():
        if not per_sec:
            raise HostError(
                f"{name} answered nothing within {secs:g} s, so that its capacity is unknown; "
                "give the load a longer duration"
            )
    return found


def sample_inputs(plan: Plan) -> dict[str, Arrays]:
    """Return what each member is sent, by member and input."""
    kernels = kernels_of(plan.members, groups_of(plan.members, 1))
    return {name: artifacts.sample_inputs(path) for name, path in kernels.items()}


def _under(plan: Plan, say: Say) -> tuple[LoadResult, Rounds]:
    kind = plan.policy.kind
    with Engine(plan, on_step=lambda what: say(f"{kind}: {what}")) as engine:
        meter = EnergyMeter(engine.gpu_uuid)
        rounds = _observed(engine, meter, say)
        stats = engine.stats()
        resident = engine.memory_bytes()
    tenants = tenants_of(rounds.together, plan.members)
    attainment, of_admitted = attained(tenants)
    done = sum(tenant.done for tenant in tenants)
    window_secs = window_secs_of(rounds.together)
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
        late_secs=late_secs(rounds.together),
        planned_bytes={name: member.planned_bytes for name, member in stats.members.items()},
        resident_bytes=resident,
        mismatches=tuple(stats.mismatches),
        faults=Counter(fault.reason for fault in stats.faults),
        recovered_secs=max(recovered, default=None),
        per_launch={name: group.per_launch for name, group in stats.groups.items()},
        launches={name: group.of_size for name, group in stats.groups.items()},
        brought={name: group.brought for name, group in stats.groups.items()},
        against_alone=tuple(
            against_alone(
                name,
                rounds.together,
                each,
                members=[m.name for m in members_of(plan.members, name)],
            )
            for name, each in rounds.alone.items()
        ),
        changes=None
        if plan.load.reshare_every is None
        else changes_of(rounds.change_secs, rounds.together, plan.members),
        outage=None
        if (out := plan.load.outage) is None
        else outage_of(
            out.member,
            "killed" if plan.load.kill else "faulted",
            rounds.together,
            rounds.outages,
            plan.members,
        ),
    )
    return result, rounds


def _observed(engine: Engine, meter: EnergyMeter, say: Say) -> Rounds:
    """Send the load to all, and in turns to each member alone that the plan names."""
    plan, load, inputs = engine.plan, engine.plan.load, sample_inputs(engine.plan)
    faulting = faulting_inputs(plan)
    lonely = {name: members_of(plan.members, name) for name in load.alone}
    together: list[Observed] = []
    change_secs: list[float] = []
    outages: list[Moments | None] = []
    alone: dict[str, list[Observed]] = {name: [] for name in lonely}
    for number in range(load.rounds):
        this = load.model_copy(update={"seed": load.seed + number})
        where = f", round {number + 1} of {load.rounds}" if load.rounds > 1 else ""
        say(f"{plan.policy.kind}: {load.kind} load for {load.duration:g} s{where}")
        breaker = Breaker(engine, faulting)
        observed, took_secs = _together(engine, this, inputs, meter, breaker)
        together.append(observed)
        outages.append(breaker.moments(observed))
        change_secs += took_secs
        for name, members in lonely.items():
            say(f"{plan.policy.kind}: {name} alone for {load.duration:g} s{where}")
            alone[name].append(run_load(engine, this, inputs, members=members))
    found = {name: tuple(each) for name, each in alone.items()}
    return Rounds(tuple(together), found, tuple(change_secs), tuple(outages))


def _together(
    engine: Engine,
    load: LoadChoice,
    inputs: Mapping[str, Arrays],
    meter: EnergyMeter,
    breaker: Breaker,
) -> tuple[Observed, Sequence[float]]:
    """Send the load to all, and return the seconds of each change of shares, too."""
    with Resharing(engine, load.reshare_every) as resharing:

        def begin() -> None:
            meter.start()
            resharing.start()

        def end() -> None:
            resharing.stop()
            meter.stop()

        observed = run_load(engine, load, inputs, on_start=begin, on_end=end, during=breaker.during)
    return observed, resharing.secs
