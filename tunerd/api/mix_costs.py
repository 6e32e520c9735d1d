"""What the engine takes of a mix's answers, measured before or now; a dry run measures nothing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunerd.api.mix_artifacts import Steps
from tunerd.api.mix_sources import memory_of
from tunerd.colocation.plan import Member, Plan
from tunerd.colocation.planning import engine_cost
from tunerd.colocation.planning.answer import Answer
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.engine_cost import EngineCost
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Mix
from tunerd.colocation.planning.placement import WHOLE, Subject
from tunerd.colocation.planning.team import Team


class MixCosts:
    """By the names of entries. lacking: gets a line where a dry run would measure."""

    def __init__(
        self,
        mix: Mix,
        folder: Path,
        device: str,
        curves: Curves,
        team: Team,
        steps: Steps,
        lacking: Lacking,
        *,
        is_dry: bool,
    ) -> None:
        self._mix, self._folder, self._device = mix, folder, device
        self._curves, self._team = curves, team
        self._steps, self._lacking, self._is_dry = steps, lacking, is_dry

    def alone(self, subjects: Sequence[Subject]) -> dict[str, EngineCost]:
        """Return what it takes beyond each entry's model, one after another."""
        models = engine_cost.at_most_busy(self._served(subjects))
        if not models:
            return {}
        for lowered in engine_cost.slower(models):  # as they were measured before
            known = self._known(self._keys(lowered))
            if len(known) == len(models):
                return known
        if self._is_dry:
            self._lacking.add_engine(self._mix)
            return {}
        found = engine_cost.measure(
            models,
            device=self._device,
            like=like(self._mix, models[0].kernels),
            say=functools.partial(self._steps.say_of, "the engine with all models"),
        )
        self._keep(found)
        return found

    def rehearsed(
        self,
        found: Answer,
        subjects: Sequence[Subject],
        costs: Mapping[str, EngineCost],
        plan: Plan,
    ) -> dict[str, EngineCost]:
        """Return what the engine takes where a plan is served, measured before or now.

        Nothing where `costs` are of that already, or all was measured at the rates of the mix.
        """
        assert found.chosen is not None
        models = self._served(subjects)
        keys = self._keys(models, len(found.chosen.placement.lanes))
        have = {name: cost.key for name, cost in costs.items()}
        if not costs or have in (keys, self._keys(models)):
            return {}
        known = self._known(keys)
        if known.keys() == keys.keys():
            return known
        if self._is_dry:
            return {}
        rehearsed = engine_cost.rehearse(
            plan,
            found.chosen,
            models,
            device=self._device,
            say=functools.partial(self._steps.say_of, "rehearsing the plan"),
        )
        self._keep(rehearsed)
        return rehearsed

    @functools.cached_property
    def _own(self) -> dict[engine_cost.Key, EngineCost]:
        """What this plan has measured, of two of one kind the later."""
        found = engine_cost.read_costs(self._folder / engine_cost.COSTS)
        return {cost.key: cost for cost in found}

    def _keys(
        self, models: Sequence[engine_cost.Served], lanes: int = 0
    ) -> dict[str, engine_cost.Key]:
        return {each.name: engine_cost.key_of(each, models, self._device, lanes) for each in models}

    def _known(self, keys: Mapping[str, engine_cost.Key]) -> dict[str, EngineCost]:
        """Return what this plan or the team has of these."""
        own = self._own
        found = {name: own.get(key) or self._team.cost(key) for name, key in keys.items()}
        return {name: cost for name, cost in found.items() if cost is not None}

    def _keep(self, found: Mapping[str, EngineCost]) -> None:
        for cost in {cost.key: cost for cost in found.values()}.values():
            engine_cost.append(self._folder / engine_cost.COSTS, cost)
            self._own[cost.key] = cost
            self._team.keep_cost(cost)

    def _served(self, subjects: Sequence[Subject]) -> list[engine_cost.Served]:
        """Return the models of all entries, each at the rate of all of its members.

        No model where they do not fit into the memory together: then no plan does.
        """
        found: dict[str, engine_cost.Served] = {}
        firsts = {subject.of: subject for subject in reversed(subjects)}.values()
        needed = sum(subject.shared_bytes + subject.each_bytes for subject in firsts)
        if (memory_bytes := memory_of(self._mix)) is not None and needed > memory_bytes:
            return []
        for subject in subjects:
            before = found.get(subject.of)
            point = self._curves.at(subject.of, WHOLE)
            if before is not None:
                found[subject.of] = dataclasses.replace(before, rate=before.rate + subject.rate)
            elif point is not None and subject.architecture:
                slo_ms = None if subject.slo_secs is None else 1e3 * subject.slo_secs
                found[subject.of] = engine_cost.Served(
                    subject.of, subject.kernels, subject.architecture, point, subject.rate, slo_ms
                )
        return list(found.values())


def like(mix: Mix, artifact: Path) -> Plan:
    """Return a plan of one member, whose place and device are the mix's."""
    member = Member(name="one", artifact=artifact)
    return Plan(place=mix.place, device=mix.device, members=(member,))
