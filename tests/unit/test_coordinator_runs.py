"""Whole runs at random: workers that answer in any order, are lost and come back."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.coordinator_world import (
    CONV,
    DENSE,
    World,
    task,
)
from tunerd.coordinator.budget import Limits
from tunerd.coordinator.coordinator import Coordinator
from tunerd.coordinator.events import (
    Tick,
)
from tunerd.coordinator.isolation import MAX_ATTEMPTS
from tunerd.vocabulary import METASCHEDULE, default_candidate


def play(world: World, tuners: int, slices: int, lanes: bool, gpus: int, losses: list[int]) -> None:
    """Run a world to its end; workers are lost at these steps and replaced a step later."""
    coordinator = world.coordinator
    world.take(coordinator.start([default_candidate(s.task) for s in coordinator.tasks.values()]))

    def lane(i: int) -> str | None:
        return f"cores-{i}" if lanes else None

    for i in range(slices):
        gpu = f"gpu-{i % gpus}" if gpus and not lanes else None
        world.join(f"slice-{i}", "slice", lane(i), gpu)
    for i in range(tuners):
        world.join(f"tuner-{i}", "tuner", lane(i))
    for step in range(max(losses, default=-1) + 1):
        if world.finished or not world.working:
            break
        if step in losses:
            lost = world.rng.choice(sorted(coordinator.workers))
            before = coordinator.workers[lost]
            world.lose(lost)
            if world.working and not world.finished:
                world.step()
            if not world.finished:
                world.join(lost, before.role, before.lane, before.device)
        else:
            world.step()
    world.run()


worlds = st.fixed_dictionaries(
    {
        "tuners": st.integers(1, 4),
        "slices": st.integers(1, 4),
        "lanes": st.booleans(),
        "gpus": st.integers(0, 2),
        "losses": st.lists(st.integers(0, 60), max_size=8, unique=True),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    shape=worlds,
    trials=st.integers(1, 90),
    tasks=st.integers(1, 4),
    fault_rate=st.sampled_from([0.0, 0.2, 0.6]),
    seed=st.integers(0, 1000),
)
def test_any_run_ends_with_every_trial_ended_once(
    shape: dict[str, object], trials: int, tasks: int, fault_rate: float, seed: int
) -> None:
    all_tasks = [task(f"t{i}", weight=i + 1) for i in range(tasks)]
    coordinator = Coordinator(all_tasks, Limits(trials=trials))
    world = World(coordinator, random.Random(seed), space=120, fault_rate=fault_rate)
    play(world, **shape)  # type: ignore[arg-type]
    assert world.finished, "nobody works and the run has not ended"
    assert set(world.ends) == {c.candidate_id for c in world.proposed}
    assert set(world.ends.values()) == {1}
    if not any(
        s.sources[METASCHEDULE].lost_proposals >= MAX_ATTEMPTS for s in coordinator.tasks.values()
    ):
        assert coordinator.ended_trials == trials
    assert len(world.proposed) == coordinator.ended_trials + tasks


@settings(max_examples=50, deadline=None)
@given(shape=worlds, seed=st.integers(0, 1000), at=st.integers(0, 120))
def test_a_run_that_is_stopped_anywhere_ends_without_a_trial_ended_twice(
    shape: dict[str, object], seed: int, at: int
) -> None:
    coordinator = Coordinator([CONV, DENSE], Limits(budget_secs=100.0))
    world = World(coordinator, random.Random(seed), fault_rate=0.1)
    handle, events = coordinator.handle, 0

    def counted(event: object) -> list[object]:
        nonlocal events
        events += 1
        out = handle(event)  # type: ignore[arg-type]
        return out + handle(Tick(101.0)) if events == at else out  # type: ignore[return-value]

    coordinator.handle = counted  # type: ignore[method-assign,assignment]
    play(world, **shape)  # type: ignore[arg-type]
    assert world.finished
    assert set(world.ends.values()) <= {1}
    assert set(world.ends) <= {c.candidate_id for c in world.proposed}


@settings(max_examples=30, deadline=None)
@given(shape=worlds, seed=st.integers(0, 1000))
def test_the_same_events_bring_the_same_instructions(shape: dict[str, object], seed: int) -> None:
    logs = []
    for _ in range(2):
        coordinator = Coordinator([CONV, DENSE], Limits(trials=50))
        world = World(coordinator, random.Random(seed), fault_rate=0.2)
        play(world, **shape)  # type: ignore[arg-type]
        logs.append(world.log)
    assert logs[0] == logs[1]
