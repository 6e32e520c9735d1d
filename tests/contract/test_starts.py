"""How a process is started: as a program, or by a fork of one that has imported what it needs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.lib.repository import ROOT
from tunerd.system import forks, spawn
from tunerd.system.forks import UNKNOWN_STATUS, Forked, ForkServer, Process
from tunerd.system.processes import ProcessId

WAIT_SECS = 30.0
# What a fork server of these tests has.
PRELOADED = """
import os, threading

MARK = object()

def preload(what):
    if what == "threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if what == "error":
        raise ImportError("there is no such module")
"""
SAYS = """
import json, os, sys

print(json.dumps({
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "folder": os.getcwd(),
    "is_leader": os.getsid(0) == os.getpid(),
    "name": __name__,
    "read": sys.stdin.read(),
    "path": sys.path[0],
}))
"""


class Way:
    """One way to start what is in a file."""

    def __init__(self, root: Path, server: ForkServer | None) -> None:
        self.root, self.server = root, server
        self.printed = root / "printed"
        self.count = 0

    def start(
        self,
        text: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        has_stdin: bool = False,
    ) -> Process:
        self.count += 1
        path = self.root / f"program{self.count}.py"
        path.write_text(text)
        with self.printed.open("wb") as output:
            process = forks.start(
                [sys.executable, str(path), *arguments],
                spawn.environment() if environment is None else environment,
                output=output.fileno(),
                has_stdin=has_stdin,
                by=self.server,
            )
        assert isinstance(process, Forked) == (self.server is not None)
        return process

    def said(self) -> dict[str, Any]:
        return dict(json.loads(self.printed.read_text()))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Programs heed SIGINT also where these tests run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that fork servers find."""
    (tmp_path / "preloaded_here.py").write_text(PRELOADED)
    path = os.pathsep.join((str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")))
    monkeypatch.setenv("PYTHONPATH", path)
    return "preloaded_here"


@pytest.fixture
def server(preloaded: str) -> Iterator[ForkServer]:
    server = ForkServer(preloaded, "nothing")
    assert server.wait_until_ready(WAIT_SECS)
    yield server
    server.close()


@pytest.fixture(params=["program", "fork"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Way:
    is_fork = request.param == "fork"
    return Way(tmp_path, request.getfixturevalue("server") if is_fork else None)


def test_a_process_has_its_arguments_and_its_environment_alone(way: Way) -> None:
    environment = {"ONLY": "this", "LANG": "C.UTF-8"}
    process = way.start(SAYS, "--count", "2", environment=environment)
    assert process.wait(WAIT_SECS) == 0
    said = way.said()
    assert said["arguments"] == ["--count", "2"]
    assert {k: v for k, v in said["environment"].items() if k != "LC_CTYPE"} == environment


def test_a_process_is_one_of_its_own_in_the_root_folder(way: Way) -> None:
    assert way.start(SAYS).wait(WAIT_SECS) == 0
    said = way.said()
    assert (said["folder"], said["is_leader"], said["name"]) == ("/", True, "__main__")
    assert said["path"] == str(way.root)
    assert said["read"] == ""


def test_a_module_is_started_by_its_name(way: Way) -> None:
    (way.root / "a_module.py").write_text(SAYS)
    with way.printed.open("wb") as output:
        process = forks.start(
            [sys.executable, "-m", "a_module", "one"],
            {"PYTHONPATH": str(way.root)},
            output=output.fileno(),
            by=way.server,
        )
    assert process.wait(WAIT_SECS) == 0
    assert way.said()["arguments"] == ["one"]


def test_a_process_reads_what_its_starter_writes_to_the_end(way: Way) -> None:
    process = way.start(SAYS, has_stdin=True)
    assert process.stdin is not None
    process.stdin.write(b"a line")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(WAIT_SECS) == 0
    assert way.said()["read"] == "a line"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('why')", 1),
        ("raise ValueError('why')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("import os; os.abort()", -signal.SIGABRT),
        ("pass", 0),
    ],
)
def test_an_exit_status_is_that_of_the_process(way: Way, text: str, status: int) -> None:
    process = way.start(text)
    assert process.wait(WAIT_SECS) == status
    assert (process.poll(), process.wait()) == (status, status)
    assert ("why" in way.printed.read_text()) == ("why" in text)


def test_what_is_to_be_done_at_the_end_of_a_process_is_done(way: Way) -> None:
    process = way.start("import atexit; atexit.register(print, 'the end'); print('first')")
    assert process.wait(WAIT_SECS) == 0
    assert way.printed.read_text().split("\n")[:2] == ["first", "the end"]


@pytest.mark.parametrize("name", ["terminate", "kill"])
def test_a_process_is_ended_by_a_signal_and_again_without_an_error(way: Way, name: str) -> None:
    process = way.start("import sys; sys.stdin.read()", has_stdin=True)
    getattr(process, name)()
    ended = -(signal.SIGTERM if name == "terminate" else signal.SIGKILL)
    assert process.wait(WAIT_SECS) == ended
    getattr(process, name)()
    assert process.poll() == ended
    assert ProcessId.of(process.pid) is None


def test_an_interrupt_ends_a_process_that_does_not_say_otherwise(way: Way) -> None:
    process = way.start("import sys; print('here', flush=True); sys.stdin.read()", has_stdin=True)
    deadline = time.monotonic() + WAIT_SECS
    while "here" not in way.printed.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    while process.poll() is None and time.monotonic() < deadline:
        os.kill(process.pid, signal.SIGINT)  # again: one may come just before it begins to read
        time.sleep(0.1)
    assert process.wait(WAIT_SECS) in (-signal.SIGINT, 130)


def test_many_may_wait_for_an_end(way: Way) -> None:
    processes = [way.start("import sys; sys.stdin.read()", has_stdin=True) for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        waits = [pool.submit(p.wait, WAIT_SECS) for p in processes for _ in range(4)]
        for process in processes:
            process.kill()
        assert {wait.result() for wait in waits} == {-signal.SIGKILL}


# --- forks ---------------------------------------------------------------------------------------


def test_a_fork_has_what_was_imported_and_no_other_fork_sees_what_it_does(
    server: ForkServer, tmp_path: Path
) -> None:
    way = Way(tmp_path, server)
    text = "import sys; m = sys.modules['preloaded_here']; print(hasattr(m, 'seen')); m.seen = 1"
    for _ in range(2):
        assert way.start(text).wait(WAIT_SECS) == 0
        assert way.printed.read_text() == "False\n"


def test_forks_do_not_draw_the_same_numbers(server: ForkServer, tmp_path: Path) -> None:
    way, drawn = Way(tmp_path, server), set[str]()
    for _ in range(2):
        assert way.start("import random; print(random.random())").wait(WAIT_SECS) == 0
        drawn.add(way.printed.read_text())
    assert len(drawn) == 2


def started(command: list[str], server: ForkServer, **environment: str) -> Process:
    with open(os.devnull, "wb") as output:
        whole = spawn.environment(environment)
        return forks.start(command, whole, output=output.fileno(), by=server)


@pytest.mark.parametrize("what", ["threads", "error"])
def test_what_cannot_be_forked_is_started_as_a_program(preloaded: str, what: str) -> None:
    server = ForkServer(preloaded, what)
    try:
        assert not server.wait_until_ready(WAIT_SECS)
        process = started([sys.executable, "-m", "this"], server)
        assert not isinstance(process, Forked)
        assert process.wait(WAIT_SECS) == 0
    finally:
        server.close()


def test_a_server_that_is_not_ready_is_not_waited_for(preloaded: str) -> None:
    server = ForkServer(preloaded, "nothing")
    try:
        assert not isinstance(started([sys.executable, "-m", "this"], server), Forked)
    finally:
        server.close()


def test_options_of_the_interpreter_and_other_programs_are_no_forks(server: ForkServer) -> None:
    for command in (
        [sys.executable, "-c", "pass"],
        [sys.executable, "-SE", "x.py"],
        ["/bin/true", "x"],
    ):
        process = started(command, server)
        assert not isinstance(process, Forked)
        process.wait(WAIT_SECS)


def test_an_environment_that_is_too_long_for_a_message_is_a_programs(server: ForkServer) -> None:
    process = started(
        [sys.executable, "-m", "this"], server, **{f"A{n}": "a" * 50_000 for n in range(8)}
    )
    assert not isinstance(process, Forked)
    assert process.wait(WAIT_SECS) == 0
    assert server.is_ready


def test_forks_go_on_when_their_server_has_ended(server: ForkServer, tmp_path: Path) -> None:
    way = Way(tmp_path, server)
    closed, killed = (way.start("import sys; sys.stdin.read()", has_stdin=True) for _ in range(2))
    server.close()
    server.close()
    assert closed.poll() is None
    assert killed.poll() is None
    killed.kill()
    assert killed.wait(WAIT_SECS) == UNKNOWN_STATUS
    assert closed.stdin is not None
    closed.stdin.close()
    assert closed.wait(WAIT_SECS) == UNKNOWN_STATUS
    assert not isinstance(started([sys.executable, "-m", "this"], server), Forked)


def test_a_server_that_was_killed_is_done_without(server: ForkServer) -> None:
    server._process.kill()
    server._process.wait()
    assert not server.is_ready
    assert not isinstance(started([sys.executable, "-m", "this"], server), Forked)


HOLDS = """
import os, sys, time
from tunerd.system.forks import ForkServer, start

server = ForkServer("preloaded_here", "nothing")
assert server.wait_until_ready(30)
with open(os.devnull, "wb") as output:
    command = [sys.executable, "-m", "timeit", "-n1", "-r1", "import time; time.sleep(600)"]
    fork = start(command, dict(os.environ), output=output.fileno(), by=server)
print(server._process.pid, fork.pid, flush=True)
time.sleep(600)
"""


def test_a_server_ends_with_its_starter_however_that_ends(preloaded: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    server, fork = (ProcessId.of(pid) for pid in pids)
    assert server is not None
    assert fork is not None
    holder.kill()
    holder.wait()
    assert server.wait(WAIT_SECS)
    assert fork.alive
    fork.signal(signal.SIGKILL)
    assert fork.wait(WAIT_SECS)


def test_a_fork_that_was_asked_for_with_a_pipe_keeps_no_end_of_it(
    server: ForkServer, tmp_path: Path
) -> None:
    # Else a runner on its leash would live on, and a server with it.
    way = Way(tmp_path, server)
    first = way.start("import sys; sys.stdin.read()", has_stdin=True)
    second = way.start("import sys; sys.stdin.read()", has_stdin=True)
    for process in (first, second):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(WAIT_SECS) == 0
    assert len(os.listdir(f"/proc/{server._process.pid}/fd")) < 12
