"""The MPS control daemon through its command line, `nvidia-cuda-mps-control`.

Commands and their meaning: NVIDIA, Multi-Process Service, "Appendix: Tools and Interface Reference"
and the man page nvidia-cuda-mps-control(1) of driver 580.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import HostError, InfrastructureError
from tunerd.system import processes
from tunerd.system.cuda_driver import CONNECTIONS
from tunerd.system.host import MPS_CONTROL
from tunerd.system.processes import ProcessId

log = logging.getLogger(__name__)

MPS_SERVER = "nvidia-cuda-mps-server"
PIPE_FOLDER = "CUDA_MPS_PIPE_DIRECTORY"
EXTERNAL_PIPE_FOLDER = Path("/tmp/nvidia-mps")  # its default
_COMMAND_SECS = 5.0
# Who gives up has to kill the client, and its neighbours with it.
_TERMINATE_SECS = 20.0
_START_SECS = 15.0
# `-d` takes some 0.3 s. One of three that began while a daemon was being killed hung for as long as
# it was waited for, where the next one began at once (one H200, driver 580).
_TRY_SECS = (1.0, 4.0, 10.0)
_QUIT_SECS = 3.0


def client_environment(pipe_folder: Path, gpu_uuid: str, pct: int) -> dict[str, str]:
    """Return what makes a process a client of a daemon, with a share of one GPU."""
    return _environment_of(pipe_folder, gpu_uuid) | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(pct)}


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would steer CUDA or MPS.

    The queues that an engine asks for in this process are not for its clients: each has one stream,
    and the GPU has queues for few processes with so many.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("CUDA_MPS_") and name not in ("CUDA_VISIBLE_DEVICES", CONNECTIONS)
    }


@dataclass(frozen=True)
class MpsControl:
    """One daemon, named by its pipe folder. Every command is bounded in time."""

    pipe_folder: Path
    log_folder: Path
    gpu_uuid: str

    def start(self) -> None:
        """Start a daemon of our own and wait until it answers.

        The compute mode and everything else on the machine stay as they are.
        """
        for folder in (self.pipe_folder, self.log_folder):
            folder.mkdir(mode=0o700, exist_ok=True)
        # Into a file: a daemon that keeps its standard output would hold a pipe open for ever.
        printed = self.log_folder / "start.log"
        for secs in _TRY_SECS:
            try:
                code = self._begin(printed, secs)
                break
            except OSError as error:
                raise InfrastructureError(f"{MPS_CONTROL} -d did not start: {error}") from error
            except subprocess.TimeoutExpired:
                log.warning("%s -d hung for %.0f s, and is ended", MPS_CONTROL, secs)
                for process in self.processes():
                    process.signal(signal.SIGKILL)
        else:
            raise InfrastructureError(
                f"{MPS_CONTROL} -d hung {len(_TRY_SECS)} times, for {sum(_TRY_SECS):.0f} s in all; "
                f"see {self.log_folder}"
            )
        deadline = time.monotonic() + _START_SECS
        while not self.answers():
            if time.monotonic() >= deadline:
                raise InfrastructureError(
                    f"{MPS_CONTROL} -d ended with {code} and its daemon does not answer"
                    f" ({printed.read_text()[-500:].strip()}); see {self.log_folder}"
                )
            time.sleep(0.05)

    def answers(self) -> bool:
        """Whether a daemon listens in the pipe folder."""
        return self._run("get_server_list") is not None

    def start_server(self) -> None:
        """Have the daemon start its server for this user, which takes half a second of the first
        client's time otherwise (NVIDIA MPS, `start_server`). It may do so later, or not at all."""
        answer = self._run(f"start_server -uid {os.getuid()}")
        log.info("start_server: %s", (answer or "no answer").strip())

    def servers(self) -> list[int] | None:
        """Return the pids of the daemon's MPS servers; None where it does not answer."""
        return _pids(self._run("get_server_list"))

    def clients(self, server: int) -> list[int] | None:
        """Return the pids of a server's clients as the daemon sees them; None without an answer."""
        return _pids(self._run(f"get_client_list {server}"))

    def server_of(self, pid: int) -> int | None:
        """Return the server that lists `pid` among its clients, or None."""
        for server in self.servers() or ():
            if pid in (self.clients(server) or ()):
                return server
        return None

    def is_client(self, pid: int, known: frozenset[int]) -> bool | None:
        """Say whether `pid` is in a client list; None where the lists cannot tell.

        In a container the daemon may see its clients under pids of another namespace. The lists are
        comparable with ours if they are empty or name one of `known`, the pids of our own runners.
        """
        servers = self.servers()
        if servers is None:
            return None
        listed: set[int] = set()
        for server in servers:
            clients = self.clients(server)
            if clients is None:
                return None
            listed.update(clients)
        if pid in listed:
            return True
        return False if not listed or listed & known else None

    def terminate(self, server: int, client: int) -> bool:
        """Destroy a client's GPU work and contexts; its neighbours go on. True where it was done.

        Only afterwards may the process be killed: NVIDIA MPS, "Client Early Termination".
        """
        command = f"terminate_client {server} {client}"
        answer = self._run(command, timeout_secs=_TERMINATE_SECS)
        log.info("terminate_client %d %d: %s", server, client, answer)
        return answer is not None and not re.search(r"CUDA_ERROR|[Ff]ail|[Ii]nvalid", answer)

    def has_fault(self) -> bool:
        """Whether a server deals with a fatal GPU error of a client: its status is FAULT then."""
        answers = [self._run(f"get_server_status {server}") for server in self.servers() or ()]
        return any("FAULT" in (answer or "") for answer in answers)

    def quit(self) -> None:
        """Stop our own daemon and its servers, and wait until they are gone. Idempotent."""
        mine = self.processes()
        if not mine:
            return
        self._run(f"quit -t {int(_QUIT_SECS)}", timeout_secs=_QUIT_SECS + 2)
        for process in mine:
            if not process.wait(1.0):
                # Its clients are gone by now: the caller has stopped every runner.
                log.warning("pid %d outlived quit", process.pid)
                process.signal(signal.SIGTERM)
                if not process.wait(1.0):
                    process.signal(signal.SIGKILL)

    def processes(self) -> list[ProcessId]:
        """Find the daemon, then its servers, by the pipe folder in their environment.

        The front end that takes our commands is the daemon's program without its argument.
        """
        pipe = (PIPE_FOLDER, str(self.pipe_folder))
        return [
            *processes.with_environment(MPS_CONTROL, *pipe, argued=True),
            *processes.with_environment(MPS_SERVER, *pipe),
        ]

    def _begin(self, printed: Path, secs: float) -> int:
        """Run `-d`, which prints into a file; return its exit code, or raise what `run` does."""
        with printed.open("wb") as output:
            return subprocess.run(
                [_binary(), "-d"],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=secs,
                cwd="/",
            ).returncode

    def _environment(self) -> dict[str, str]:
        return (
            clean_environment()
            | _environment_of(self.pipe_folder, self.gpu_uuid)
            | {"CUDA_MPS_LOG_DIRECTORY": str(self.log_folder)}
        )

    def _run(self, command: str, *, timeout_secs: float = _COMMAND_SECS) -> str | None:
        """Return what the daemon prints, or None where it is not there or not answering."""
        try:
            done = subprocess.run(
                [_binary()],
                input=command + "\n",
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=timeout_secs,
                cwd="/",
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("%s: %s", command, error)
            return None
        # The front end's status is not zero where the daemon is not found (man page).
        return done.stdout if done.returncode == 0 else None


def _environment_of(pipe_folder: Path, gpu_uuid: str) -> dict[str, str]:
    return {PIPE_FOLDER: str(pipe_folder), "CUDA_VISIBLE_DEVICES": gpu_uuid}


def _binary() -> str:
    path = shutil.which(MPS_CONTROL)
    if path is None:
        raise HostError(
            f"{MPS_CONTROL} is not on PATH; it comes with the NVIDIA driver"
            " (Debian and Ubuntu: package nvidia-compute-utils-VERSION)"
        )
    return path


def _pids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    return [int(word) for line in text.splitlines() for word in line.split() if word.isdigit()]
