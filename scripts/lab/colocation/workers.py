"""Processes that wait for one word, do what it says, and answer: a line of JSON each way.

A worker makes its models when it is told to, so that its start costs nobody's clocks; groups of
them are told the moment at which to begin.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.system.cuda_driver import ask_for_connections

_ANSWER = "ANSWER "  # before what is meant for us: libraries print, too
LEAD_SECS = 0.05  # between the word and the moment at which a group begins

Answers = Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]


class WorkerError(RuntimeError):
    """A worker said what it could not do; it waits for the next word."""


class WorkerGone(WorkerError):
    """A worker ended, or does not answer."""


def serve(answers: Answers) -> None:
    """Be a worker: answer the lines of stdin until it ends. `answers`: by the key `do`."""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] != "prepare":
            exempt_from_collections()
        try:
            said = answers[asked["do"]](asked)
        except Exception as error:
            said = {"problem": f"{type(error).__name__}: {error}"[:600]}
        print(_ANSWER + json.dumps(said), flush=True)


def exempt_from_collections() -> None:
    """Keep the collector of garbage from stopping this process while it is measured.

    tunerd's engine does so for itself; whatever it is compared with has to have it as well.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


class Worker:
    """The other end of a process that serves. What it prints to stderr goes to a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors, text=True,
            )  # fmt: skip
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **said: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(said) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerGone(f"{error}; {self._last_words()}") from None

    def answer(self, timeout_secs: float) -> dict[str, Any]:
        """Return its answer; raises WorkerError."""
        deadline = time.monotonic() + timeout_secs
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerGone(f"{self} gave no answer within {timeout_secs:.0f} s") from None
            if line is None:
                raise WorkerGone(f"it ended: {self._last_words()}")
            if line.startswith(_ANSWER):
                said = dict(json.loads(line.removeprefix(_ANSWER)))
                if "problem" in said:
                    raise WorkerError(said["problem"])
                return said

    def __str__(self) -> str:
        return f"worker {self._log.parent.name}/{self._log.stem}"

    def hang_up(self) -> None:
        """Have it end by itself, since the death of a client by signal may end its neighbours."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self, timeout_secs: float = 30.0) -> None:
        self.hang_up()
        try:
            self._process.wait(timeout_secs)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        said = self._log.read_text(errors="replace")[-400:].strip()
        return f"exit code {self._process.poll()}, {said}"


class Group:
    """Workers that do the same at the same moment. After WorkerGone it is of no use."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)

    def prepare(self, timeout_secs: float) -> list[dict[str, Any]]:
        return self._all(timeout_secs, do="prepare")

    def sample(self, label: str, mode: str, secs: float) -> list[dict[str, Any]]:
        """Have all run something from one moment on; return their answers."""
        at = time.monotonic() + LEAD_SECS
        return self._all(secs + 60.0, do="sample", label=label, mode=mode, secs=secs, at=at)

    def _all(self, timeout_secs: float, **said: Any) -> list[dict[str, Any]]:
        """Return all answers; raises the worst of what went wrong when all have answered.

        All that ended or did not answer in time are named.
        """
        for worker in self.workers:
            worker.tell(**said)
        deadline, answers = time.monotonic() + timeout_secs, []
        errors: list[WorkerError] = []
        for worker in self.workers:
            try:
                answers.append(worker.answer(max(0.1, deadline - time.monotonic())))
            except WorkerError as error:
                errors.append(error)
        if gone := [error for error in errors if isinstance(error, WorkerGone)]:
            raise WorkerGone("; ".join(map(str, gone)))
        if errors:
            raise errors[0]
        return answers


def close_all(groups: Sequence[Group], timeout_secs: float = 30.0) -> None:
    """End all workers at once; those that have not ended by then are killed."""
    everyone = [worker for group in groups for worker in group.workers]
    for worker in everyone:
        worker.hang_up()
    deadline = time.monotonic() + timeout_secs
    for worker in everyone:
        worker.close(max(0.1, deadline - time.monotonic()))


def wait_until(at: float) -> None:
    """Return at a moment of time.monotonic(), which all processes of a machine share."""
    while (left := at - time.monotonic()) > 0:
        if left > 0.002:
            time.sleep(left - 0.001)


@contextlib.contextmanager
def mps_daemon() -> Iterator[Callable[[int | None], dict[str, str]]]:
    """Start an MPS daemon for the first GPU; yield what makes the environment of a client.

    That takes the client's share in percent, None for a client without a limit.
    """
    from tunerd.slices.mps.control import clean_environment, client_environment
    from tunerd.system import host

    uuid = host.facts().gpus[0].uuid
    folder = Path(tempfile.mkdtemp(prefix="mps-"))  # short: a socket's path has 107 characters

    def environment(pct: int | None) -> dict[str, str]:
        made = clean_environment() | client_environment(folder / "pipe", uuid, pct or 100)
        if pct is None:
            del made["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        return made

    with _daemon(folder / "pipe", folder / "log", uuid):
        yield environment


@contextlib.contextmanager
def mps_for_all(log: Path) -> Iterator[None]:
    """Start an MPS daemon for all GPUs where every process looks for one, without a limit."""
    from tunerd.slices.mps.control import EXTERNAL_PIPE_FOLDER
    from tunerd.system import host

    with _daemon(EXTERNAL_PIPE_FOLDER, log, ",".join(gpu.uuid for gpu in host.facts().gpus)):
        yield


@contextlib.contextmanager
def _daemon(pipe: Path, log: Path, uuids: str) -> Iterator[None]:
    """SIGTERM ends this process as an exit does, so that the daemon, to others a stranger, ends."""
    from tunerd.slices.mps.control import MpsControl

    control = MpsControl(pipe, log, uuids)
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        control.start()
        yield
    finally:
        control.quit()
        signal.signal(signal.SIGTERM, before)


def here(module: str, *arguments: object) -> list[str]:
    """Return the command of a worker that is a module of this folder."""
    return [sys.executable, "-m", f"lab.colocation.{module}", *map(str, arguments)]


def found_by(module: str, *arguments: object, log: Path, secs: float) -> dict[str, Any]:
    """Return what a module of this folder wrote into --result, in a process of its own.

    What it prints goes to the log. Raises WorkerError where it failed or did not end in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    done = None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        command = here(module, *arguments, "--result", result)
        with log.open("w") as said, contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, check=False, timeout=secs, stdout=said, stderr=said)
        if done is None or done.returncode:
            ended = f"ended with {done.returncode}" if done else f"did not end within {secs:.0f} s"
            raise WorkerError(f"it {ended}: {log.read_text(errors='replace')[-400:].strip()}")
        return dict(json.loads(result.read_text()))


def plain_environment() -> dict[str, str]:
    """Return this process's, with as many queues to the GPU for everyone as the engine asks for."""
    ask_for_connections()
    return dict(os.environ)
