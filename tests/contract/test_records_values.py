"""Whatever a store is given comes back as it was."""
# ruff: noqa: F811  fixtures are arguments

from __future__ import annotations

import dataclasses
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lib.record_samples import FACTS, TASK, candidate, place, store  # noqa: F401  fixtures
from tests.lib.store_places import StorePlace, proposed
from tunerd.records import RunFacts, Store
from tunerd.vocabulary import Conditions, Failure, Kind, Measurement, Stage

_secs = st.floats(min_value=1e-9, max_value=1e3)
_small = st.integers(min_value=0, max_value=2**31)
_conditions = st.builds(
    Conditions,
    sm_clock_mhz=st.none() | _small,
    temperature_c=st.none() | _small,
    power_w=st.none() | _secs,
    neighbours=st.none() | _small,
    strangers=st.none() | _small,
    disturbed_by=st.text(max_size=20),
)
_measurements = st.builds(
    Measurement,
    run_secs=st.lists(_secs, min_size=1, max_size=6).map(tuple),
    calls_per_sample=_small,
    profile=st.text(max_size=5),
    slice_id=st.text(max_size=5),
    sm_count=_small,
    conditions=_conditions,
)
_failures = st.builds(
    Failure,
    stage=st.sampled_from(Stage),
    kind=st.sampled_from([k for k in Kind if k.ends_trial]),
    message=st.text(max_size=50),
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    result=_measurements | _failures,
    trace=st.text(max_size=20),
    at=st.floats(min_value=0, max_value=1e10),
)
def test_every_result_comes_back_as_it_was(
    place: StorePlace, result: Measurement | Failure, trace: str, at: float
) -> None:
    with place.fresh().open(FACTS) as store:
        store.register_tasks([TASK])
        (trial,) = proposed(store, [dataclasses.replace(candidate(1), recipe=trace)], now=at)
        store.start([trial], "cpu-0-0", now=at)
        store.finish(trial, result, now=at)
        record = store.record(trial)
    assert record.result == result
    assert record.candidate.recipe == trace
    assert record.proposed_at == record.started_at == record.ended_at == at


def test_a_message_that_is_no_text_is_stored_all_the_same(store: Store) -> None:
    (trial,) = proposed(store, [candidate(1)])
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, "bad \udcff byte\0"))
    assert store.record(trial).result == Failure(Stage.BUILD, Kind.COMPILE, "bad ? byte\0")


def test_facts_survive_json() -> None:
    facts = dataclasses.replace(FACTS, settings={"trials": 3}, host={"gpus": []})
    assert RunFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_a_character_that_postgresql_lacks_and_its_escape_come_back_as_they_were(
    store: Store,
) -> None:
    said = "\ue000 \0 \ue000\0 \ue0000 \ue000\ue000"
    (trial,) = proposed(store, [candidate(1)])
    store.finish(trial, Failure(Stage.BUILD, Kind.COMPILE, said))
    assert store.record(trial).result == Failure(Stage.BUILD, Kind.COMPILE, said)
