"""A journal has whole lines alone, on a full disk and after a kill; a document is old or new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lib.full_disk import full_beyond
from tunerd.system.files import write_whole
from tunerd.system.jsonl import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "done.jsonl")


def numbers(journal: Journal) -> list[int]:
    return [json.loads(line)["n"] for line in journal.read().splitlines()]


def line(number: int) -> str:
    return json.dumps({"n": number, "of": "x" * 50})


def test_lines_come_back_in_order(journal: Journal) -> None:
    assert journal.read() == b""
    for number in range(3):
        journal.append(line(number))
    assert numbers(journal) == [0, 1, 2]


@pytest.mark.parametrize("room_bytes", [0, 1, 20, 68])
def test_a_line_for_which_there_is_no_room_leaves_nothing(
    room_bytes: int, journal: Journal
) -> None:
    journal.append(line(0))
    before = journal.path.read_bytes()
    assert len(line(1)) == 68  # and its end
    with full_beyond(len(before) + room_bytes), pytest.raises(OSError, match="File too large"):
        journal.append(line(1))
    assert journal.path.read_bytes() == before
    journal.append(line(2))
    assert numbers(journal) == [0, 2]


@pytest.mark.parametrize("left", [b"{", b'{"n": 7', line(7).encode()])
@pytest.mark.parametrize("count", [0, 2])
def test_half_a_line_is_not_read_and_makes_way_for_the_next(
    left: bytes, count: int, journal: Journal
) -> None:
    for number in range(count):
        journal.append(line(number))
    with journal.path.open("ab") as file:  # as of a kill, or where it could not be cut off
        file.write(left)
    assert numbers(journal) == list(range(count))
    journal.append(line(8))
    assert numbers(journal) == [*range(count), 8]
    assert numbers(Journal(journal.path)) == [*range(count), 8]


def test_a_document_for_which_there_is_no_room_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600
    with full_beyond(2), pytest.raises(OSError, match="File too large"):
        write_whole(path, b"the new one")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
