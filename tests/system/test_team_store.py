"""What a run takes from a team's store and gives to it, on a file and on a real server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.postgres_server import PASSWORD, PostgresServer
from tests.lib.record_samples import FACTS, LLVM, OTHER_TASK, TASK, measurement
from tests.lib.store_places import StorePlace, proposed, read_shared
from tunerd.errors import ExitCode, InputError, StoreError, StoreMissError
from tunerd.records import RunFacts, Store, task_outcomes
from tunerd.records import server as shared
from tunerd.records.conditions_key import Obtained
from tunerd.records.problems import StoreLost
from tunerd.records.schema import VERSION
from tunerd.runs.team_store import PAUSES_SECS, TeamStore
from tunerd.stats.paired import compare
from tunerd.studies.compare import decide, load_sides
from tunerd.system.store_address import StoreAddress
from tunerd.vocabulary import (
    DEFAULT_SOURCE,
    METASCHEDULE,
    Candidate,
    CapProof,
    Failure,
    Kind,
    Model,
    Stage,
    TensorSpec,
    candidate_id,
    default_candidate,
)
from tunerd.vocabulary.outcome import (
    Comparison,
    Finalist,
    Latency,
    Outcome,
    TaskOutcome,
    Verification,
)
from tunerd.vocabulary.verdict import Verdict

TASKS = (TASK, OTHER_TASK)
ON = Obtained.of(CapProof("cpu-0-0", "CPU X", 1, 2, "affinity", True, "6.1"), FACTS, "p")


@pytest.fixture(params=["file", "server"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> StoreAddress:
    if request.param == "file":
        return StoreAddress.parse(f"sqlite:///{tmp_path / 'team.sqlite'}")
    return StoreAddress.parse(request.getfixturevalue("postgres").new_database())


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Yield the server to a test that ends it; it runs again afterwards."""
    yield postgres
    if postgres.process is None:
        postgres.start()


@dataclasses.dataclass
class Member:
    """One run of the team."""

    own: Store
    team: TeamStore
    pauses: list[float] = dataclasses.field(default_factory=list)

    def tune(self, *task_ids: str, ratio: float = 2.0, on: Obtained | None = ON) -> None:
        """Settle tasks with a trial each."""
        for task_id in task_ids or ("t0", "t1"):
            (trial,) = proposed(self.own, [winner := winner_of(task_id, f"{ratio}")])
            self.own.start([trial], "cpu-0-0")
            self.own.finish(trial, measurement(1.0))
            self.own.save_task_outcome(outcome_of(winner, ratio), on=on)

    def take(self, *, on: Obtained = ON, require: bool = False) -> dict[str, TaskOutcome]:
        return self.team.take(TASKS, on, require=require)


@pytest.fixture
def join(address: StoreAddress, tmp_path: Path) -> Iterator[Iterator[Member]]:
    """Yield new members of the team, as many as are asked for."""
    made: list[Member] = []

    def members() -> Iterator[Member]:
        while True:
            made.append(member(tmp_path / f"run{len(made)}", address))
            yield made[-1]

    yield members()
    for each in made:
        each.own.close()


def member(folder: Path, address: StoreAddress, *, facts: RunFacts = FACTS) -> Member:
    folder.mkdir(exist_ok=True)
    own = StorePlace(folder=str(folder)).open(facts)
    own.register_tasks(TASKS)
    pauses: list[float] = []
    team = TeamStore(address, own, say=lambda _: None, pause=pauses.append)
    return Member(own, team, pauses)


def winner_of(task_id: str, mark: str) -> Candidate:
    trace = f'[["{mark}"],[]]'
    return Candidate(task_id, candidate_id(task_id, trace), METASCHEDULE, trace)


def outcome_of(winner: Candidate, ratio: float) -> TaskOutcome:
    return TaskOutcome(
        task_id=winner.task_id,
        name="as that run called it",
        weight=7,
        trials=1,
        failed=0,
        default_secs=ratio,
        best_secs=1.0,
        winner=winner,
        comparison=Comparison(Verdict.FASTER, ratio, 1.0, ratio, ratio, ratio),
        note="",
    )


# --- hits --------------------------------------------------------------------------------------


def test_what_one_run_gave_another_takes_with_its_own_names(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    assert first.take() == {}
    first.tune()
    assert first.team.publish() == 2
    found = second.take()
    assert set(found) == {"t0", "t1"}
    taken = found["t0"]
    assert (taken.name, taken.weight, taken.trials) == (TASK.name, TASK.weight, 0)
    assert taken.winner == winner_of("t0", "2.0")
    assert taken.winner.recipe == winner_of("t0", "2.0").recipe
    assert taken.taken is not None
    assert taken.taken.run == first.own.identity
    assert list(second.own.records()) == []


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Obtained)])
def test_what_was_obtained_on_something_else_is_no_hit(join: Iterator[Member], field: str) -> None:
    first, second = next(join), next(join)
    first.tune()
    first.team.publish()
    value = 99 if field in ("sm_count", "tenants") else "another"
    assert second.take(on=dataclasses.replace(ON, **{field: value})) == {}
    assert len(second.take()) == 2


def test_only_what_changed_is_left_to_tune(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    first.tune("t1")
    first.team.publish()
    assert set(second.take()) == {"t1"}


def test_of_several_records_the_one_that_gained_most_is_taken(join: Iterator[Member]) -> None:
    for ratio in (1.5, 3.0, 2.0):
        each = next(join)
        each.tune("t0", ratio=ratio)
        each.team.publish()
    default = dataclasses.replace(
        outcome_of(default_candidate(TASK), 1.0), comparison=None, note="it stays", best_secs=0.1
    )
    lazy = next(join)
    lazy.own.save_task_outcome(default, on=ON)
    lazy.team.publish()
    assert next(join).take()["t0"].winner == winner_of("t0", "3.0")


def test_a_winner_that_was_compared_with_nothing_is_taken_only_where_there_is_no_other(
    join: Iterator[Member],
) -> None:
    lucky = dataclasses.replace(
        outcome_of(winner_of("t0", "lucky"), 1.0), comparison=None, default_secs=None
    )
    first = next(join)
    first.own.save_task_outcome(lucky, on=ON)
    first.team.publish()
    taken = next(join).take()["t0"]
    assert (taken.winner, taken.comparison) == (lucky.winner, None)
    second = next(join)
    second.tune("t0", ratio=1.1)
    second.team.publish()
    assert next(join).take()["t0"].winner == winner_of("t0", "1.1")


@pytest.mark.parametrize("is_published", [False, True])
def test_what_another_s_fault_left_unsettled_is_neither_given_nor_taken(
    join: Iterator[Member], address: StoreAddress, is_published: bool
) -> None:
    default = default_candidate(TASK)
    spoiled = Failure(Stage.RUN, Kind.COLLATERAL, "a neighbour's fault")
    unsettled = dataclasses.replace(
        outcome_of(default, 1.0),
        comparison=None,
        finalists=(Finalist(default.candidate_id, DEFAULT_SOURCE, None, spoiled),),
    )
    first = next(join)
    first.own.save_task_outcome(unsettled, on=ON)
    if is_published:  # as an earlier tunerd did
        _, facts = first.own.sessions()[-1]
        with Store.join(address, first.own.identity, facts=facts) as shared:
            shared.register_tasks(TASKS)
            shared.save_task_outcome(unsettled, on=ON)
    else:
        assert first.team.publish() == 0
    second = next(join)
    assert second.take() == {}
    second.tune("t0")
    second.team.publish()
    assert first.take()["t0"].winner == winner_of("t0", "2.0")


def test_a_default_that_stays_is_a_record_too(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    stays = dataclasses.replace(outcome_of(default_candidate(TASK), 1.0), note="it stays")
    first.own.save_task_outcome(stays, on=ON)
    first.team.publish()
    taken = second.take()["t0"]
    assert not taken.is_tuned
    assert taken.note == "it stays"


def test_a_task_that_was_not_reached_is_not_given(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    for task in TASKS:
        none = dataclasses.replace(outcome_of(default_candidate(task), 1.0), trials=0)
        first.own.save_task_outcome(none, on=ON)
    assert first.team.publish(exhausted={"t1"}) == 1
    assert set(second.take()) == {"t1"}


def test_what_was_taken_is_not_given_again(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    first.tune()
    first.team.publish()
    second.take()
    assert second.team.publish() == 0


def test_a_run_that_goes_on_keeps_what_it_took_and_what_it_settled(
    join: Iterator[Member], address: StoreAddress, tmp_path: Path
) -> None:
    first, other = next(join), next(join)
    first.tune("t0")
    first.team.publish()
    other.tune("t1", ratio=4.0)
    other.team.publish()
    mine = next(join)
    mine.tune("t1")
    assert set(mine.take()) == {"t0"}
    gone = StoreAddress.parse(f"sqlite:///{tmp_path}/nowhere/team.sqlite")
    again = TeamStore(gone, mine.own, say=lambda _: None)
    assert set(again.take(TASKS, ON, require=True)) == {"t0", "t1"}  # without asking
    assert {o.task_id: o.taken is not None for o in mine.own.task_outcomes()} == {
        "t0": True,
        "t1": False,
    }


def test_a_record_whose_winner_is_not_what_its_id_says_is_passed_over(
    join: Iterator[Member],
) -> None:
    first, second = next(join), next(join)
    first.tune("t0", "t1")
    good = outcome_of(winner_of("t0", "2.0"), 2.0)
    forged = dataclasses.replace(good.winner, recipe="[[],[]]")
    first.own.save_task_outcome(dataclasses.replace(good, winner=forged), on=ON)
    first.team.publish()
    assert set(second.take()) == {"t1"}


def test_to_require_hits_names_the_tasks_that_miss(join: Iterator[Member]) -> None:
    first, second = next(join), next(join)
    first.tune("t0")
    first.team.publish()
    with pytest.raises(StoreMissError, match=r"lacks 1 of 2 tasks .*: dense \(t1\); tune") as error:
        second.take(require=True)
    assert error.value.exit_code is ExitCode.STORE_MISS
    first.tune("t1", ratio=3.0)
    first.team.publish()
    assert set(second.take(require=True)) == {"t0", "t1"}


# --- many at once, and dying -------------------------------------------------------------------


def test_runs_that_finish_the_same_tasks_at_once_all_keep_theirs(
    join: Iterator[Member], address: StoreAddress
) -> None:
    members = [next(join) for _ in range(6)]
    for number, each in enumerate(members, 2):
        each.tune(ratio=float(number))
    ready = threading.Barrier(len(members))
    published: list[int] = []

    def publish(each: Member) -> None:
        ready.wait()  # the store is new: they also meet in creating its tables
        published.append(each.team.publish())

    threads = [threading.Thread(target=publish, args=(each,)) for each in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert published == [2] * len(members)
    last = next(join)
    with Store.join(address, last.own.identity, facts=FACTS) as store:
        found = store.measured_on(ON, ["t0", "t1"])
    assert [len(found[t]) for t in ("t0", "t1")] == [len(members)] * 2
    assert last.take()["t0"].winner == winner_of("t0", "7.0")


def test_a_run_that_dies_while_it_writes_leaves_nothing_and_writes_it_next_time(
    join: Iterator[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = next(join), next(join)
    first.tune()
    save = task_outcomes.save

    def dies(*arguments: object, **options: object) -> None:
        save(*arguments, **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(task_outcomes, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        first.team.publish()
    monkeypatch.setattr(task_outcomes, "save", save)
    assert second.take() == {}
    assert first.team.publish() == 2
    assert first.team.publish() == 2  # as often as it likes
    assert len(second.take()) == 2


# --- the server --------------------------------------------------------------------------------


@pytest.fixture
def on_server(server: PostgresServer, tmp_path: Path) -> Iterator[Member]:
    made = member(tmp_path / "run", StoreAddress.parse(server.new_database()))
    made.tune()
    yield made
    made.own.close()


def test_a_server_that_restarts_meanwhile_is_waited_for(
    on_server: Member, server: PostgresServer
) -> None:
    server.stop()
    seen: list[float] = []

    def pause(secs: float) -> None:
        seen.append(secs)
        if len(seen) == 3:
            server.start()

    on_server.team._pause = pause
    assert on_server.team.publish() == 2
    assert seen == list(PAUSES_SECS[:3])


def test_a_server_that_stays_away_is_a_sentence(on_server: Member, server: PostgresServer) -> None:
    server.stop()
    with pytest.raises(StoreError, match=r"cannot be reached: .*; 7 times in 30 s: ") as error:
        on_server.team.publish()
    assert error.value.exit_code is ExitCode.INFRASTRUCTURE
    assert "the same command writes to it" in str(error.value)
    assert on_server.pauses == list(PAUSES_SECS)
    assert PASSWORD not in str(error.value)


def test_whoever_wants_to_stop_is_not_kept_by_a_server_that_is_away(
    on_server: Member, server: PostgresServer
) -> None:
    server.stop()

    def say(message: str) -> None:
        if "trying again" in message:
            raise KeyboardInterrupt

    on_server.team._say = say
    with pytest.raises(KeyboardInterrupt):
        on_server.team.publish()
    assert on_server.pauses == []


def test_a_connection_that_is_cut_in_use_is_lost(server: PostgresServer) -> None:
    address = StoreAddress.parse(server.new_database())
    with Store.join(address, "ours", facts=FACTS) as store:
        server.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tunerd'"
        )
        with pytest.raises(StoreLost, match="cannot be reached"):
            store.register_tasks([TASK])


@pytest.mark.parametrize("password", ["Wr0ng", None])
def test_a_refused_password_is_said_at_once_and_not_shown(
    server: PostgresServer, tmp_path: Path, password: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSWORD", raising=False)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "none"))
    server.new_database()
    made = member(tmp_path / "run", StoreAddress.parse(server.address("postgres", password)))
    with made.own, pytest.raises(StoreError, match=r"refuses: .*PGPASSWORD or in") as error:
        made.take()
    assert made.pauses == []
    assert "Wr0ng" not in str(error.value)


def test_the_password_may_come_from_the_environment(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.new_database()
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    address = StoreAddress.parse(server.address("postgres", None))
    Store.join(address, "ours", facts=FACTS).close()
    server.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")


def test_a_user_without_rights_is_told_which_are_needed(server: PostgresServer) -> None:
    address = server.new_database()
    database = StoreAddress.parse(address).url.database or ""
    server.execute(f"ALTER DATABASE {database} SET default_transaction_read_only = on")
    with pytest.raises(StoreError, match="tunerd needs the right to create tables"):
        Store.join(StoreAddress.parse(address), "ours", facts=FACTS)


def test_a_database_of_another_program_or_version_is_refused(server: PostgresServer) -> None:
    address = StoreAddress.parse(server.new_database())
    database = address.url.database or ""
    server.execute("CREATE TABLE trials (x integer)", database)
    with pytest.raises(StoreError, match="holds another program's tables, such as trials"):
        Store.join(address, "ours", facts=FACTS)
    server.execute("DROP TABLE trials", database)
    with pytest.raises(StoreError, match="is empty: no run has written to it yet"):
        read_shared(address, "ours")
    Store.join(address, "ours", facts=FACTS).close()
    server.execute(f"UPDATE schema_version SET version = {VERSION + 1}", database)
    with pytest.raises(StoreError, match=f"has schema version {VERSION + 1}"):
        Store.join(address, "ours", facts=FACTS)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"run pip install '(tunerd|\.)\[postgres\]'"):
        Store.join(StoreAddress.parse("postgresql://db/tunerd"), "ours", facts=FACTS)


def test_the_target_is_part_of_what_was_obtained() -> None:
    other = dataclasses.replace(
        FACTS, target=dataclasses.replace(LLVM, json='{"kind":"llvm","mcpu":"skylake"}')
    )
    proof = CapProof("cpu-0-0", "CPU X", 1, 2, "affinity", True, "6.1")
    assert Obtained.of(proof, other, "p") != ON


# --- the gate ----------------------------------------------------------------------------------


def whole_model(model: Model, secs: float) -> Outcome:
    """Return what a run of a model ends with whose inferences take about `secs`."""
    times = tuple(secs * (1 + 0.001 * (i % 7)) for i in range(40))
    defaults = tuple(10 * t / secs for t in times)
    return Outcome(
        model=model,
        target=FACTS.target,
        tasks=(),
        verification=Verification(Verdict.RIGHT, 1, 1e-3, 1e-3, 0.0, ""),
        latencies=(Latency("default", defaults), Latency("tuned", times)),
        end_to_end=compare(defaults, times),
        artifact="artifact",
        proofs=(CapProof("cpu-0-0", "CPU X", 1, 2, "affinity", attached=True),),
    )


def test_the_gate_compares_a_run_with_the_newest_other_one_of_the_store(
    join: Iterator[Member],
    address: StoreAddress,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    model = Model("net", "d" * 64, (TensorSpec("x", (1,), "float32"),), (), graph=None)
    for secs in (3.0, 1.0, 2.0):
        each = next(join)
        outcome = whole_model(model, secs)
        each.own.save_outcome(outcome)
        each.team.publish(outcome)
    query = f"{address.shown}#model=net,share=cpu50"
    base, new = load_sides(query, str(tmp_path / "run2"))
    assert base.timing is not None
    assert new.timing is not None
    assert (base.timing.run_secs[0], new.timing.run_secs[0]) == (1.0, 2.0)
    assert decide(base, new, fail_above=0.05).verdict is Verdict.SLOWER
    absent = f"{address.shown}#run={next(join).own.identity}"
    with pytest.raises(InputError, match=r"no run that has ended with run=.*model=net,share=cpu50"):
        load_sides(absent, str(tmp_path / "run2"))


def test_the_gate_takes_a_run_of_the_same_precision_from_the_store(tmp_path: Path) -> None:
    address = StoreAddress.parse(f"sqlite:///{tmp_path / 'team.sqlite'}")
    model = Model("net", "d" * 64, (TensorSpec("x", (1,), "float32"),), (), graph=None)
    for number, precision in enumerate(("fp16", "fp32", "fp16", None)):
        settings = {**FACTS.settings, "precision": precision}
        facts = dataclasses.replace(FACTS, settings=settings)
        each = member(tmp_path / f"run{number}", address, facts=facts)
        with each.own:
            outcome = whole_model(model, 1.0 + number)
            each.own.save_outcome(outcome)
            each.team.publish(outcome)
    query, night = f"{address.shown}#model=net", str(tmp_path / "run2")

    def base_of(query: str) -> tuple[str, float]:
        base, _ = load_sides(query, night)
        assert base.timing is not None
        return base.precision, base.timing.run_secs[0]

    assert base_of(query) == ("fp16", 1.0)
    assert base_of(f"{query},precision=fp32") == ("fp32", 2.0)
    assert base_of(f"{query},precision=as exported") == ("as exported", 4.0)
    with Store.read(tmp_path / "run1") as other:
        named = f"{query},run={other.identity}"
    assert base_of(named) == ("fp32", 2.0)
    found = decide(*load_sides(named, night), fail_above=0.05)
    assert (found.verdict, found.differences) == (None, ("precision: fp32 and fp16",))
    with pytest.raises(InputError, match=r"with model=net,precision=fp32; it has .*precision=fp16"):
        load_sides(query, str(tmp_path / "run1"))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sqlite:////nowhere/team.sqlite#night=1", "not by 'night'"),
        ("sqlite://team.sqlite#model=net", "the store cannot be used"),
        ("postgresql://me:secret@host/db#model=net", "set PGPASSWORD"),
    ],
)
def test_a_query_that_cannot_be_is_one_sentence(query: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        load_sides(query, query)
    assert "secret" not in str(raised.value)
