"""The order of what runs in a lane whose seats are processes."""

from __future__ import annotations

from dataclasses import dataclass

from tunerd.colocation.places.lines import Line


@dataclass(eq=False)
class Start:
    held: str
    is_ready: bool = True
    is_asked: bool = False


def asked(line: Line[Start]) -> list[Start]:
    """Ask for what may be asked for."""
    found = []
    for run in line.next():
        run.is_asked = True
        found.append(run)
    return found


def line_of(*runs: Start) -> Line[Start]:
    line: Line[Start] = Line()
    for run in runs:
        line.add(run)
    return line


def test_a_seat_is_asked_for_its_next_and_another_one_when_it_has_left() -> None:
    first, second, other, last = (Start(held) for held in ("one", "one", "other", "one"))
    line = line_of(first, second, other, last)
    assert asked(line) == [first, second]
    assert asked(line) == []
    line.leave(first)
    assert asked(line) == []
    line.leave(second)
    assert asked(line) == [other]
    line.leave(other)
    assert asked(line) == [last]


def test_what_is_left_without_a_run_lets_nobody_pass_what_runs_before_it() -> None:
    running, lost, another = Start("other"), Start("one"), Start("other")
    line = line_of(running, lost)
    assert asked(line) == [running]
    assert line.leave_seat("one") == [lost]  # its process was lost, and that of the other was not
    again = Start("one")
    line.add(again)
    line.add(another)
    assert asked(line) == []
    assert line.leave_seat("one") == [again]
    assert asked(line) == [another]
    line.leave(running)
    line.leave(another)


def test_what_a_lost_seat_was_asked_for_leaves_together_and_others_go_on() -> None:
    first, second, other = Start("one"), Start("one"), Start("other")
    line = line_of(first, second, other)
    assert asked(line) == [first, second]
    assert line.leave_seat("one") == [first, second]
    assert asked(line) == [other]


def test_nobody_passes_what_is_brought_yet() -> None:
    brought, behind = Start("one", is_ready=False), Start("one")
    line = line_of(brought, behind)
    assert asked(line) == []
    brought.is_ready = True
    assert asked(line) == [brought, behind]
