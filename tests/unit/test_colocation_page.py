"""What the page and the lines of a bench of policies say, where some was not measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.lib.report_pages import Page, plain
from tunerd.colocation.bench import Benched
from tunerd.colocation.load.outage import Neighbour, Outage, Stretch, Taken
from tunerd.colocation.load.result import LoadResult, TenantResult
from tunerd.colocation.plan import Plan
from tunerd.report.colocation import bench_page, bench_table
from tunerd.system.text import UNKNOWN

PLAN = Plan.model_validate({"members": [{"name": "one", "artifact": Path("a")}]})


def tenant(name: str, p99_secs: float | None, *, done: int = 600, asked: int = 600) -> TenantResult:
    met = done / asked
    return TenantResult(
        "one", name, asked, done, asked - done, 0, 0, 0.01, 0.02, p99_secs, done / 8, 0.2, met, 1.0
    )


def result(policy: str, *tenants: TenantResult) -> LoadResult:
    total = sum(t.per_sec for t in tenants)
    return LoadResult(
        policy, "in-process", tenants, 8.0, total, 0.9, 1.0, None, None, {"one": 1 << 20}, {}
    )


def page_of(*results: LoadResult) -> Page:
    return Page(bench_page(Benched(PLAN, results, ())))


def terminal(*results: LoadResult) -> str:
    console = Console(width=500)
    with console.capture() as captured:
        console.print(bench_table(Benched(PLAN, results, ())))
    return plain(captured.get())


def points(page: Page) -> list[str]:
    return [c for _, attributes in page.tags if "point" in (c := attributes.get("class") or "")]


def test_a_policy_is_a_dot_that_is_seen_without_the_pointer() -> None:
    page = page_of(result("time", tenant("a", 0.3)), result("space", tenant("a", 0.2)))
    assert points(page) == ["point line-0 alone", "point line-1 alone"]
    assert "Not drawn" not in page.text


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"RuntimeError: no": 1}, "1 fault, all served again within 250 ms: RuntimeError: no"),
        (
            {"TypeError: why": 1, "RuntimeError: no": 3},
            "4 faults, all served again within 250 ms: in 3 times RuntimeError: no",
        ),
    ],
)
def test_faults_are_counted_and_what_most_of_them_said_stands_there(
    faults: dict[str, int], said: str
) -> None:
    of = replace(result("time", tenant("a", 0.3)), faults=faults, recovered_secs=0.25)
    assert said in page_of(of).text
    assert said in terminal(of)


def test_a_policy_without_a_p99_is_named_below_the_plot() -> None:
    page = page_of(
        result("time", tenant("a", 0.3)), result("ordered", tenant("a", 0.1), tenant("b", None))
    )
    assert points(page) == ["point line-0 alone"]
    assert "Not drawn is ordered: not every tenant has a p99 there." in page.text


def test_where_no_policy_has_a_p99_the_page_says_that_nothing_is_drawn() -> None:
    page = page_of(result("time", tenant("a", None)))
    assert points(page) == []
    assert "There is nothing to draw" in page.text


def test_a_percentile_that_is_missing_is_explained_on_the_page_and_the_terminal() -> None:
    few = tenant("shop", None, done=450, asked=578)
    results = result("time", tenant("shop", 0.3)), result("ordered", few, tenant("press", 0.1))
    said = (
        "ordered: p99 takes 500 answered requests; one shop had 450 of 578; give a longer "
        "--duration"
    )
    assert said in page_of(*results).text
    assert said in terminal(*results)
    assert "time: p99" not in terminal(*results)


def test_of_many_tenants_without_a_p99_some_are_named() -> None:
    few = [tenant(f"t{number}", None, done=90) for number in range(9)]
    said = terminal(result("time", *few))
    assert "time: p95 takes 100, p99 takes 500 answered requests; one t0 had 90 of 600" in said
    assert "one t3 had 90 of 600, and 5 more too few; give" in said


def test_memory_is_said_of_each_member_and_of_those_that_are_loaded_as_one() -> None:
    mib = 1 << 20
    planned = {"one": 2 * mib, "two": 30 * mib}
    time = replace(result("time", tenant("a", 0.3)), planned_bytes=planned)
    used = replace(time, policy="space", resident_bytes={"one": mib, "two": 29 * mib})
    one = replace(time, policy="space-time", resident_bytes={"one+1": 33 * mib})
    rows = (
        "memory planned time space space-time",
        "one 2.00 MiB 2.00 MiB, 1.00 MiB used 2.00 MiB",
        "two 30.0 MiB 30.0 MiB, 29.0 MiB used 30.0 MiB",
        f"one+1 {UNKNOWN} {UNKNOWN} 33.0 MiB used",
    )
    assert terminal(time, used, one).endswith(" ".join(rows))
    text = page_of(time, used, one).text
    assert "Memory of each" in text
    assert "30.0 MiB, 29.0 MiB used" in text


def test_a_load_that_ended_before_all_served_again_says_so() -> None:
    taken = Taken(1.0, 0.25, 0.5, 2, 1), Taken(1.0, 0.75, None, 0, 0), Taken(1.0, None, None, 0, 0)
    two = Neighbour(
        "two",
        Stretch(1.0, 100.0, 0.003, 0.004),
        Stretch(0.5, 10.0, None, 0.5),
        Stretch(0.0, None, None, None),
    )
    some = replace(
        result("time", tenant("a", 0.3)), outage=Outage("one", "faulted", taken[:2], 1, (two,))
    )
    none = replace(some, outage=Outage("one", "killed", taken[2:], 0, ()))
    said = terminal(some, none)
    assert (
        "one faulted in 2 rounds: it served again after 250 ms, 750 ms; all after 500 ms; 1 time "
        "the load ended before each had answered something that was sent since; give a longer "
        "duration; 1 time the request that was to fault was refused before it ran; 2 requests of "
        "others lost, 1 of its own"
    ) in said
    assert (
        f"two before, during and after: 100, 10.0, {UNKNOWN} answers per second; p99 3.00 ms, "
        f"{UNKNOWN}, {UNKNOWN}; the longest 4.00 ms, 500 ms, {UNKNOWN}"
    ) in said
    assert "one was killed once: 1 time the load ended before" in said
