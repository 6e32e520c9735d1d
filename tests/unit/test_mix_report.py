"""A planned mix on the terminal and as a page: members that are alike are one row."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.lib.planning_world import DEVICE, point
from tests.lib.report_pages import Page, plain
from tunerd.colocation.bench import Benched
from tunerd.colocation.plan import Plan
from tunerd.colocation.planning.answer import Answer, answer
from tunerd.colocation.planning.curves import Curves
from tunerd.colocation.planning.mix import Mix, names_of
from tunerd.colocation.planning.pairs import Pairs
from tunerd.colocation.planning.placement import Forecast, Lane, Subject
from tunerd.colocation.planning.planned import PlannedMix
from tunerd.colocation.planning.proof import Proof, Proven
from tunerd.colocation.planning.search import lanes_of
from tunerd.colocation.planning.world import World
from tunerd.report.alike import names_text, places_of, problems_text, span
from tunerd.report.mix import mix_json, mix_page, mix_table

SECS = {
    "resnet": {25: 6e-4, 50: 3e-4, 100: 2.5e-4},
    "encoder": {25: 9e-4, 50: 5e-4, 100: 4e-4},
}
ALIKE = ("resnet-0", "resnet-5", "resnet-6", "resnet-7")
OTHERS = ("resnet-1", "resnet-2", "resnet-3", "resnet-4")


def mix_of(count: int, rate: float = 400) -> Mix:
    resnets = {"artifacts": [f"/{nth}" for nth in range(count)], "rate": rate, "slo_ms": 20}
    encoder = {"artifact": "/e", "rate": 100, "slo_ms": 20}
    members = [{"name": "resnet", **resnets}, {"name": "encoder", **encoder}]
    return Mix.model_validate({"members": members})


def world_for(mix: Mix) -> World:
    subjects = [
        Subject(name, entry.name, entry.rate, 0.02, each_bytes=1 << 20)
        for entry in mix.members
        for name in names_of(entry)
    ]
    points = [point(of, share, secs) for of, at in SECS.items() for share, secs in at.items()]
    return World(subjects, Curves(points), Pairs((), DEVICE), busy=0.8)


def planned(mix: Mix, found: Answer, proof: Proof | None = None) -> PlannedMix:
    curves = world_for(mix).curves
    return PlannedMix(mix, Path("m"), found, None, proof, curves, Pairs((), DEVICE), "few")


def of_two_lanes() -> tuple[Mix, Forecast]:
    mix = mix_of(8)
    lanes = [Lane(50, ("resnet-0", "encoder", *reversed(ALIKE[1:]))), Lane(50, OTHERS)]
    return mix, world_for(mix).forecast(lanes_of(lanes))


def answered(chosen: Forecast, **said: Any) -> Answer:
    known = {"said": "plan", "reasons": (), "alternatives": (), "searched": None, "times": 1.4}
    return Answer(chosen=chosen, **known | said)


def proved(forecast: Forecast, late: Sequence[str] = ()) -> Proof:
    """Return a proof in which each member's times differ, and these are late too often."""
    proven = [
        Proven(each, 100 + nth, 100 + nth, (1210 + nth) * 1e-6, (4000 + 50 * nth) * 1e-6, 10.0,
               0.5 if each.member in late else 1 - nth / 1e4)
        for nth, each in enumerate(forecast.expected)
    ]  # fmt: skip
    plan = {"members": [{"name": "a", "artifact": "/a"}], "load": {"kind": "poisson"}}
    return Proof(tuple(proven), Benched(Plan.model_validate(plan), (), ()))


def printed(found: PlannedMix, *, is_dry: bool = False) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(mix_table(found, is_dry=is_dry))
    return console.export_text()


def rows(text: str) -> list[list[str]]:
    """Return the cells of lines that begin with a member."""
    lines = [line for line in text.splitlines() if re.match(r"(resnet|encoder)\S*( |$)", line)]
    return [[plain(cell) for cell in re.split(r"  +", line.strip())] for line in lines]


def test_members_of_an_entry_in_one_lane_are_one_row() -> None:
    mix, chosen = of_two_lanes()
    text = printed(planned(mix, answered(chosen)))
    assert [row[0] for row in rows(text)] == [
        "resnet-0, resnet-5 to resnet-7 (4 alike)",
        "resnet-1 to resnet-4 (4 alike)",
        "encoder",
    ]
    assert [row[1:4] for row in rows(text)] == [
        ["50% (50 cores)", lane, rate]
        for lane, rate in (("0", "400/s"), ("1", "400/s"), ("0", "100/s"))
    ]
    headline = "A plan: 50%: resnet-0, resnet-5 to resnet-7, encoder; 50%: resnet-1 to resnet-4"
    assert text.startswith(headline)
    assert "Members that are alike have one row" in text


def test_what_was_proved_of_alike_members_is_summed_or_a_range() -> None:
    mix, chosen = of_two_lanes()
    found = planned(mix, answered(chosen), proved(chosen))
    one, other, encoder = rows(printed(found))[3:]
    assert one[:3] == ["resnet-0, resnet-5 to resnet-7 (4 alike)", "418", "418"]
    assert other[4] == "1.21 ms"  # 1.211 to 1.214 read the same
    assert other[6] == "4.05 to 4.20 ms"
    assert one[8:] == ["99.9%", "kept"]  # the worst of 100.0%, 99.9%, 99.9% and 99.9%
    assert encoder[:3] == ["encoder", "108", "108"]
    page = Page(mix_page(found)).text
    assert page.count("resnet-1 to resnet-4 (4 alike)") == 2
    assert "4.05 to 4.20 ms" in page


@pytest.mark.parametrize("late", [("resnet-2",), ("resnet-1", "resnet-2", "resnet-3")])
def test_who_broke_a_promise_is_named(late: tuple[str, ...]) -> None:
    mix, chosen = of_two_lanes()
    found = planned(mix, answered(chosen), proved(chosen, late))
    proof = rows(printed(found))[3:]
    (broke,) = (row for row in proof if row[-1] == "not kept")
    assert broke[0].removesuffix(" (3 alike)") == ", ".join(late)
    assert broke[-2] == "50.0%"
    assert all(row[-1] == "kept" for row in proof if row is not broke)
    assert f"a promise was not kept: {', '.join(late)}" in plain(printed(found))
    assert ", ".join(late) in Page(mix_page(found)).text


def test_json_has_each_member() -> None:
    mix, chosen = of_two_lanes()
    document = mix_json(planned(mix, answered(chosen), proved(chosen)))
    assert len(document["chosen"]["expected"]) == len(document["proof"]["members"]) == 9
    assert document["text"] == f"A plan: {chosen.placement.text()}"
    assert "resnet-4" in document["text"]


@pytest.mark.parametrize(("rate", "said"), [(60, "plan"), (400, "unfit")])
def test_a_page_explains_a_mix_of_forty_members_that_are_alike(rate: float, said: str) -> None:
    mix = mix_of(40, rate)
    found = answer(world_for(mix), shares=(25, 50, 100), together=(1,))
    assert found.said == said
    text = printed(planned(mix, found), is_dry=True)
    assert len(text.splitlines()) < 50
    assert re.search(r"\(\d\d alike\)", text)


def test_members_that_are_not_alike_are_told_as_they_are() -> None:
    mix = mix_of(1)
    chosen = world_for(mix).forecast(lanes_of([Lane(100, ("encoder", "resnet-0"))]))
    reasons = ("encoder: is late", "resnet-0: is late")
    text = printed(planned(mix, answered(chosen, said="unfit", reasons=reasons, times=2.0)))
    assert [row[0] for row in rows(text)] == ["resnet-0", "encoder"]
    assert text.splitlines()[1:3] == ["  encoder: is late", "  resnet-0: is late"]
    assert "alike" not in text


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["encoder", "resnet-0"], "encoder, resnet-0"),
        (["resnet-1", "resnet-0"], "resnet-0, resnet-1"),
        (["resnet-11", "resnet-9", "resnet-10", "resnet-2"], "resnet-2, resnet-9 to resnet-11"),
        (
            [f"resnet-{nth}" for nth in range(0, 20, 2)],
            "resnet-0, resnet-2, resnet-4, resnet-6, resnet-8, resnet-10, 4 more of resnet",
        ),
    ],
)
def test_names_of_an_entry_are_told_in_short(names: list[str], said: str) -> None:
    assert names_text(names, places_of(mix_of(20))) == said


def test_a_problem_of_several_is_told_once() -> None:
    problems = [*(f"resnet-{nth}: is late" for nth in range(3)), "encoder: is late", "memory: few"]
    assert problems_text(problems, places_of(mix_of(8))) == [
        "resnet-0 to resnet-2: is late", "encoder: is late", "memory: few",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        ("1.21 ms", "1.22 ms", "1.21 to 1.22 ms"),
        ("761 µs", "1.02 ms", "761 µs to 1.02 ms"),
        ("1.02", "1.03", "1.02 to 1.03"),
        ("12.8%", "12.8%", "12.8%"),
    ],
)
def test_two_values_are_a_range_in_one_unit(low: str, high: str, said: str) -> None:
    assert span(low, high) == said
