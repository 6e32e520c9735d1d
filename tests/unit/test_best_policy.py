"""Which policy met the objectives best, and when that cannot be told."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tunerd.colocation.bench import Benched, Rounds
from tunerd.colocation.load.generator import DONE, REFUSED, Observed, Sample
from tunerd.colocation.load.result import LoadResult, attained, tenants_of
from tunerd.colocation.plan import Plan
from tunerd.report.policies_text import best_sentence

SLO_SECS = 0.2
Latency = Callable[[float], float | None]  # of a request by when it was meant; None: refused


def plan(*, slo: bool = True) -> Plan:
    member = {"name": "one", "artifact": Path("a")} | ({"slo_ms": 1e3 * SLO_SECS} if slo else {})
    return Plan.model_validate({"members": [member]})


def observed(latency: Latency, secs: float) -> Observed:
    samples = []
    for number in range(int(50 * secs)):
        at, took = number / 50, latency(number / 50)
        end = REFUSED if took is None else DONE
        samples.append(Sample("one", "default", at, at, at + (took or 0.0), end))
    return Observed(tuple(samples), (0.1 * secs, 0.9 * secs))


def benched(policies: dict[str, Latency], *, secs: float = 20, slo: bool = True) -> Benched:
    of, results, rounds = plan(slo=slo), [], []
    for name, latency in policies.items():
        seen = observed(latency, secs)
        tenants = tenants_of([seen], of.members)
        results.append(
            LoadResult(name, "p", tenants, 0.8 * secs, 1.0, *attained(tenants), None, None, {}, {})
        )
        rounds.append(Rounds((seen,), {}))
    return Benched(of, tuple(results), tuple(rounds))


def late_in(part: float, seed: int) -> Latency:
    """Answer a part of the bursts of 2 s late."""
    rng = random.Random(seed)
    late = {stretch for stretch in range(100) if rng.random() < part}
    return lambda at: 0.5 if int(at / 2) in late else 0.01


def names(found: Benched) -> list[str]:
    assert found.best is not None
    return [result.policy for result in found.best.foremost]


def test_the_policy_that_keeps_more_promises_is_best() -> None:
    found = benched({"time": lambda _: 0.5, "space": lambda at: 0.5 if at % 2 < 1 else 0.1,
                     "ordered": lambda at: None if at % 2 < 0.19 else 0.1})  # fmt: skip
    assert names(found) == ["ordered"]
    assert best_sentence(found.best) == (
        "best by the plan's objectives: ordered 90.0% of all requests within their SLO; "
        "behind it: space 50.0%, time 0.0%"
    )


def test_policies_that_keep_all_promises_cannot_be_told_apart_and_their_tails_are_said() -> None:
    found = benched({"space": lambda _: 0.1, "ordered": lambda _: 0.05, "time": lambda _: 0.5})
    assert names(found) == ["space", "ordered"]
    said = best_sentence(found.best).replace("\N{NO-BREAK SPACE}", " ")
    assert "which cannot be told apart; behind them: time 0.0%" in said
    assert "the slowest tenant's p99: space 100 ms, ordered 50.0 ms" in said


def test_bursts_count_and_not_requests() -> None:
    """Of hundreds of requests more are late, and all of them in one burst or two more."""
    assert len(names(benched({"a": late_in(0.2, 1), "b": late_in(0.3, 2)}))) == 2


def test_a_short_load_tells_nothing() -> None:
    found = benched({"a": lambda _: 0.5, "b": lambda _: 0.1}, secs=5)
    assert names(found) == ["b", "a"]
    assert best_sentence(found.best).startswith("no policy is best by the plan's objectives: b")
    assert "give a longer --duration" in best_sentence(found.best)


def test_without_an_objective_no_policy_is_called_best() -> None:
    found = benched({"a": lambda _: 0.5, "b": lambda _: 0.1}, slo=False)
    assert found.best is None
    assert "the plan has no objective" in best_sentence(found.best)


def test_of_policies_that_are_alike_one_is_seldom_called_best() -> None:
    told = sum(
        len(names(benched({"a": late_in(0.3, 2 * seed), "b": late_in(0.3, 2 * seed + 1)}))) == 1
        for seed in range(100)
    )
    assert told <= 8
