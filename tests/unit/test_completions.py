"""What was launched on several streams, and who is told first of its end."""

from __future__ import annotations

from collections import Counter

import pytest

from tunerd.colocation.places import completions
from tunerd.colocation.places.completions import Completions, Entry, Line


class Ended:
    """Work that has ended, or has not."""

    def __init__(self, done: bool = True) -> None:
        self.done = done

    def is_done(self) -> bool:
        return self.done


class Watched:
    """Lines whose ends are noted in the order in which they are told."""

    def __init__(self, count: int) -> None:
        self.of = Completions()
        self.lines = [self.of.line() for _ in range(count)]
        self.told: list[str] = []

    def add(self, line: Line, name: str, work: Ended | None = None) -> None:
        def ended(error: Exception | None) -> None:
            assert error is None
            self.told.append(name)

        self.of.add(line, Entry(work or Ended(), 0.0, ended))


def test_each_line_is_the_first_as_often_as_the_others() -> None:
    watched, firsts = Watched(5), Counter[str]()
    for _ in range(20):
        for number, line in enumerate(watched.lines):
            watched.add(line, str(number))
        watched.told.clear()
        watched.of.look()
        assert sorted(watched.told) == ["0", "1", "2", "3", "4"]
        firsts[watched.told[0]] += 1
    assert firsts == dict.fromkeys("01234", 4)


def test_lines_to_whose_ends_others_add_come_before_these() -> None:
    watched = Watched(3)
    bringing = watched.of.line(is_first=True)
    for _ in range(4):
        for number, line in enumerate(watched.lines):
            watched.add(line, str(number))
        watched.add(bringing, "brought")
        watched.told.clear()
        watched.of.look()
        assert watched.told[0] == "brought"


def test_the_ends_of_a_line_are_told_in_order_and_of_one_that_was_left_to_nobody() -> None:
    watched = Watched(2)
    kept, left = watched.lines
    hangs = Ended(done=False)
    watched.add(kept, "first")
    watched.add(kept, "second", hangs)
    watched.add(kept, "third")
    watched.add(left, "left")
    left.is_left = True
    watched.of.look()
    assert watched.told == ["first"]
    hangs.done = True
    assert watched.of.look() is None
    assert watched.told == ["first", "second", "third"]


def test_a_look_is_due_at_once_where_work_was_added_to_a_line_that_had_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(2)
    assert watched.of.look() is None

    def ended(_: Exception | None) -> None:
        for line in watched.lines:
            watched.add(line, "later", Ended(done=False))

    watched.of.add(watched.lines[0], Entry(Ended(), 0.0, ended))
    monkeypatch.setattr(completions, "_AWAKE_SECS", 0.0)
    assert watched.of.look() is not None
