"""What a session takes over of trials that were under way when others ended."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import create_autospec

from tests.test_records import FACTS, TASK, candidate
from tunerd.runs.folder import RunFolder
from tunerd.runs.ledger import Ledger
from tunerd.telemetry.events import Telemetry
from tunerd.vocabulary import Candidate, Failure, Measurement

TRIED = candidate(0)
Taken = tuple[list[tuple[Candidate, Measurement | Failure]], list[Candidate], set[str]]


def take_over(run: RunFolder) -> Taken:
    ledger = Ledger(run, create_autospec(Telemetry, instance=True))
    return ledger.take_over({TASK.task_id})


def cut_off(folder: Path, *running: Candidate) -> Taken:
    """Have a session end while trials run, and return what it took over from those before it."""
    with RunFolder.open(folder, facts=FACTS) as run:
        run.store.register_tasks([TASK])
        taken = take_over(run)
        run.store.start(run.store.propose(running), "cpu-0-0")
    return taken


def test_what_was_running_when_a_session_was_killed_is_a_suspect_in_the_next(
    tmp_path: Path,
) -> None:
    cut_off(tmp_path, TRIED)
    ended, unfinished, suspects = cut_off(tmp_path)
    assert ended == []
    assert unfinished == [TRIED]
    assert suspects == {TRIED.candidate_id}
