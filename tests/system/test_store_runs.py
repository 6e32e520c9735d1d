"""Whole runs with a team's store on a real server: what they take, refuse, and never write."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import onnx
import psutil
import pytest

from tests.lib.models import conv_net
from tests.lib.postgres_server import PASSWORD, PostgresServer
from tests.lib.tune_process import Run
from tests.system.test_session import FINISHED
from tunerd.errors import ExitCode
from tunerd.records import Store
from tunerd.system import host

TRIALS = 40
SECRETS = (PASSWORD, quote(PASSWORD, safe=""), PASSWORD[:6])

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        host.facts().usable_cores < 2, reason="these runs use two slices of a core each"
    ),
]


@dataclass(frozen=True)
class Night:
    """A run that ended, and all that it wrote."""

    code: int
    out: str
    err: str
    folder: Path
    command_lines: tuple[str, ...]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def from_store(self) -> dict[str, bool]:
        return {task["name"]: task["from_store"] for task in self.document["tasks"]}


def night(folder: Path, model: Path, address: str, *options: str) -> Night:
    given = ("--slice", "simulated", "--slices", "1", "--tuners", "1", "--trials", str(TRIALS))
    run = Run(folder, model, (*given, "--store", address, *options))
    run.start()
    assert run.process is not None
    seen: set[str] = set()
    while run.process.poll() is None:
        try:
            processes = [psutil.Process(run.process.pid), *run.processes()]
            # Until it has run itself again the first shows what it was given.
            seen |= {" ".join(p.cmdline()) for p in processes[1:]}
            if len(processes) > 1:
                seen.add(" ".join(processes[0].cmdline()))
        except psutil.Error:
            continue
        try:
            run.process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    code, out, err = run.end()
    return Night(code, out, err, folder, tuple(seen))


@pytest.fixture(scope="module")
def nights(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Night]:
    """Run the same model twice, then one that differs in a task: refused, and tuned."""
    root = tmp_path_factory.mktemp("nights")
    onnx.save(conv_net(), root / "net.onnx")
    onnx.save(conv_net(classes=7), root / "changed.onnx")
    address = postgres.new_database()
    model, changed = root / "net.onnx", root / "changed.onnx"
    return {
        "first": night(root / "first", model, address),
        "second": night(root / "second", model, address, "--require-hit"),
        "refused": night(root / "refused", changed, address, "--require-hit"),
        "changed": night(root / "changed", changed, address),
    }


def test_the_first_night_tunes_every_task(nights: dict[str, Night]) -> None:
    first = nights["first"]
    assert first.code in FINISHED, first.err
    assert not any(first.from_store.values())
    assert first.document["trials"] == TRIALS


def test_the_second_night_builds_from_records_alone(nights: dict[str, Night]) -> None:
    first, second = nights["first"], nights["second"]
    assert second.code in FINISHED, second.err
    assert all(second.from_store.values())
    assert second.document["tasks_from_store"] == len(second.from_store)
    assert second.document["trials"] == 0
    assert second.document["verification"]["verdict"] == "right"
    winners = [
        {t["task_id"]: t["winner"]["candidate_id"] for t in each.document["tasks"]}
        for each in (first, second)
    ]
    assert winners[0] == winners[1]
    with Store.read(second.folder) as store:
        assert list(store.records()) == []
    assert "from the store" in (second.folder / "report.html").read_text()


def test_a_miss_is_refused_by_name_and_code(nights: dict[str, Night]) -> None:
    refused = nights["refused"]
    assert refused.code == ExitCode.STORE_MISS
    message = refused.document["error"]["message"]
    assert "lacks 1 of 5 tasks" in message
    assert "matmul" in message
    assert not (refused.folder / "artifact").exists()


def test_only_the_task_that_changed_is_tuned_again(nights: dict[str, Night]) -> None:
    changed = nights["changed"]
    assert changed.code in FINISHED, changed.err
    tuned = [name for name, is_taken in changed.from_store.items() if not is_taken]
    assert len(tuned) == 1
    assert "matmul" in tuned[0]
    with Store.read(changed.folder) as store:
        (task_id,) = {r.candidate.task_id for r in store.records()}
        assert {t.task_id: t.name for t in store.tasks()}[task_id] == tuned[0]


def test_the_password_is_in_nothing_that_a_run_leaves_or_says(nights: dict[str, Night]) -> None:
    found = []
    for name, each in nights.items():
        texts = {"stdout": each.out, "stderr": each.err}
        texts |= {"a command line": "\n".join(each.command_lines)}
        for path in each.folder.rglob("*"):
            if path.is_file():
                texts[str(path)] = path.read_bytes().decode("latin-1")
        assert "postgresql+psycopg://team@" in texts[str(each.folder / "settings.json")]
        found += [(name, where) for where, text in texts.items() if holds_secret(text)]
    assert found == []


def holds_secret(text: str) -> bool:
    return any(secret in text for secret in SECRETS)
