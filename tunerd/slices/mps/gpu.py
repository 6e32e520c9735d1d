"""One GPU under its guard: the MPS daemon, the runners, and what happens to them after a fault."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunerd.errors import HostError
from tunerd.runner.host import RUNNER_COMMAND
from tunerd.slices.gpu_tenants import Own
from tunerd.slices.mps.control import (
    EXTERNAL_PIPE_FOLDER,
    PIPE_FOLDER,
    MpsControl,
    client_environment,
)
from tunerd.slices.mps.gpu_runner import GpuRunner, end_client
from tunerd.slices.mps.log import LOG_NAME, ServerLog, external_log_folder
from tunerd.system.files import write_whole
from tunerd.system.forks import ForkServer, can_fork
from tunerd.system.processes import ProcessId, with_children
from tunerd.vocabulary import SliceSpec

log = logging.getLogger(__name__)

GRACE_SECS = 2.0  # for a runner to end by itself when its slice is gone
_LISTED_SECS = 5.0  # for a new client to appear in the MPS server's list
_REPORT_SECS = 0.5  # for a slice to say what a fault was, before the GPU is fenced without it
_KILLED_SECS = 10.0  # for the driver to let go of what was killed: up to six on an H200
_STATUS_SECS = 1.0  # between two looks at a server whose log is not ours to read
UNNAMED = "some client of the GPU"
_SLICE_ID = re.compile(r"[A-Za-z0-9-]{1,32}")  # it becomes part of a socket's path


class Gpu:
    """Daemon and runners of one GPU. Methods may be called from several threads.

    `folder` is private to the user and locked by the caller. The state file in it is enough to
    clean up after this process, should it be killed. `external` is the pipe folder of somebody
    else's daemon, which is used and never stopped; None stands for one of our own.
    """

    def __init__(
        self,
        uuid: str,
        folder: Path,
        *,
        run: str,
        external: Path | None = None,
        runner_command: tuple[str, ...] = RUNNER_COMMAND,
    ) -> None:
        self.run = run
        self.external = external is not None
        self.epoch = 0  # faults so far: a runner belongs to the epoch in which it was started
        self._uuid = uuid
        self._folder = folder
        self._runner_command = runner_command
        self._forks: ForkServer | None = None  # starts what comes after the first runners
        self._control = MpsControl(external or folder / "pipe", folder / "log", uuid)
        log_folder = external_log_folder() if external else self._control.log_folder
        self._server_log = ServerLog(log_folder / LOG_NAME)
        self._daemon: set[ProcessId] = set()  # of ours, and its servers, as far as they were seen
        self._killed: frozenset[ProcessId] = frozenset()  # which may need long to be gone
        self._runners: dict[str, GpuRunner] = {}
        self._specs: dict[str, SliceSpec] = {}  # by slice
        self._successors: dict[str, GpuRunner] = {}  # that no slice has asked for yet
        self._started = 0  # runners so far: makes the name of each socket new
        self._pids: set[int] = set()  # of all runners, daemons and servers so far
        self._past: set[int] = set()  # those of epochs that are over
        self._culprit = ""
        self._reason = ""
        self._lived: dict[str, bool] = {}  # whether a slice's runner did when the last epoch ended
        self._had_fault = False  # the status of a server whose log is not ours to read
        self._looked_at = 0.0
        self._lock = threading.RLock()  # held while runners are started or all of them are fenced

    def open(self) -> None:
        """Clean up after a guard that died, then start the daemon or find the external one."""
        orphan_epoch = clean_orphan(self._folder, self._uuid)
        if orphan_epoch is not None:  # slices that lived through it learn that their runners fell
            self.epoch = orphan_epoch + 1
            self._culprit, self._reason = "the GPU guard", "it was killed"
        if not self.external:
            self._control.start()
            self._start_server()
        elif not self._control.answers():
            raise HostError(
                f"no MPS daemon answers in {self._control.pipe_folder}; start one with"
                " nvidia-cuda-mps-control -d, set CUDA_MPS_PIPE_DIRECTORY to its pipe folder,"
                " or leave out --mps external"
            )
        self._begin_epoch()
        if can_fork(self._runner_command):
            self._forks = ForkServer("tunerd.runner.preload", "cuda")

    def close(self) -> None:
        """Stop every runner, then the daemon if it is ours. Idempotent."""
        with self._lock:
            self._stop(self._runners, grace_secs=GRACE_SECS)
            self._stop(self._successors, grace_secs=0)
            if self._forks is not None:
                self._forks.close()
            if not self.external:
                self._control.quit()
            (self._folder / "state.json").unlink(missing_ok=True)

    def start_runner(self, spec: SliceSpec) -> GpuRunner:
        """Start the runner of a slice; a former one of the same slice is stopped first."""
        self._check(spec)
        slice_id = spec.slice_id
        with self._lock:
            if slice_id in self._runners:
                self.stop(self._runners[slice_id], grace_secs=GRACE_SECS)
            self._require_pipe_folder()
            runner = self._successors.pop(slice_id, None)
            if runner and (runner.exit_status is not None or self._specs[slice_id] != spec):
                runner.stop(self._control, grace_secs=0)
                runner = None
            self._specs[slice_id] = spec
            self._runners[slice_id] = runner or self._started_anew(slice_id)
            self._save()
            return self._runners[slice_id]

    def expect(self, spec: SliceSpec) -> None:
        """Start the runner of a slice that has yet to ask for one: it imports TVM meanwhile."""
        self._check(spec)
        with self._lock:
            self._require_pipe_folder()
            self._specs[spec.slice_id] = spec
            self._successors[spec.slice_id] = self._started_anew(spec.slice_id)
            self._save()

    def _check(self, spec: SliceSpec) -> None:
        """Raise ValueError unless a runner with this slice's environment has the slice's share."""
        if not _SLICE_ID.fullmatch(spec.slice_id) or not 1 <= spec.pct <= 100:
            raise ValueError(
                f"slice '{spec.slice_id}' at {spec.pct}% is none that a guard can start"
            )
        environment = dict(spec.environment)
        for name, value in client_environment(self.pipe_folder, self._uuid, spec.pct).items():
            if environment.get(name) != value:
                raise ValueError(
                    f"slice '{spec.slice_id}' at {spec.pct}% has {name}={environment.get(name)}, "
                    f"and its runner needs {value}"
                )

    def _require_pipe_folder(self) -> None:
        """Replace our own daemon where nobody finds it any more: a new client would have no cap.

        Its clients notice nothing: they are disturbed only when one more is wanted.
        """
        if not self.external and not self._control.pipe_folder.is_dir():
            self.fence("the MPS daemon", "its pipe folder was deleted")

    def _started_anew(self, slice_id: str) -> GpuRunner:
        spec = self._specs[slice_id]
        self._started += 1
        runner = GpuRunner(
            slice_id,
            self._runner_command,
            socket_path=self._folder / f"{slice_id}.{self._started}.sock",
            log_path=self._folder / f"{slice_id}.log",
            environment=dict(spec.environment),
            forks=self._forks,
        )
        self._pids.add(runner.pid)
        self._past.discard(runner.pid)  # pids come back
        log.info("started %s at %d%%: pid %d", slice_id, spec.pct, runner.pid)
        return runner

    def runner(self, slice_id: str) -> GpuRunner | None:
        """Return the runner of a slice; None too where it fell with the others of its GPU."""
        with self._lock:  # while all of them are fenced, their ends say nothing
            return self._runners.get(slice_id)

    @property
    def pipe_folder(self) -> Path:
        return self._control.pipe_folder

    def own(self, slice_id: str) -> Own:
        """Say what on this GPU is ours, and how many runners live beside a slice's, busy or not."""
        living = {s for s, r in list(self._runners.items()) if r.exit_status is None}
        with self._lock:
            pids = frozenset(self._pids)
        return Own(pids, len(living), len(living - {slice_id}))

    def attached(self, pid: int) -> bool | None:
        """Say whether the MPS server lists a runner as its client; None where that is unknown.

        That it does not is believed when it lasts: of six clients that came to a new server at
        once, one was missing from its list (seen on an H200, driver 580).
        """
        others = frozenset(r.pid for r in list(self._runners.values())) - {pid}
        deadline = time.monotonic() + _LISTED_SECS
        while (listed := self._control.is_client(pid, others)) is False:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if len(self._daemon) < 2:  # its server is there by now
            self._see_daemon()
        return listed

    def stop(self, runner: GpuRunner, *, grace_secs: float) -> None:
        """Stop one runner; its neighbours go on."""
        safe = runner.stop(self._control, grace_secs=grace_secs)
        with self._lock:
            if self._runners.get(runner.slice_id) is runner:  # it has not fallen meanwhile
                del self._runners[runner.slice_id]
                if not safe:
                    self.fence(runner.slice_id, "it was killed because it could not be terminated")
            self._save()

    def fence(
        self,
        culprit: str,
        reason: str,
        *,
        epoch: int | None = None,
        shared: bool = False,
        alone: bool = False,
    ) -> dict[str, Any]:
        """Stop every runner after a fault, which no client of the GPU survives.

        The MPS server takes new clients only when all clients of the fault are gone (NVIDIA MPS,
        "Memory Protection and Error Containment"), and terminating one took up to six seconds (one
        H200, driver 580). So one of our own is killed with its clients, and replaced.

        Args:
            culprit: who is to blame, unless all clients get the error.
            epoch: of the runner that reports the fault. An earlier one than now was fenced before:
                that runner fell with the culprit's, and nothing more is done.
            shared: whether all clients of the GPU get this error, as they do of what the MPS server
                writes. Then nobody is blamed for reporting it first, unless nobody else worked.
            alone: whether the other runners were idle, as far as who reports knows.

        Returns:
            The epoch that begins, and who was blamed for the end of the last one.
        """
        with self._lock:
            if epoch is None or epoch >= self.epoch:
                self.epoch += 1
                fallen = self._runners
                self._lived = {s: r.exit_status is None for s, r in fallen.items()}
                told = self._server_log.fault(self._past)
                if (shared or told) and not self._is_only_one(culprit, alone=alone):
                    culprit = UNNAMED
                self._culprit, self._reason = culprit, reason
                log.warning("epoch %d begins: %s: %s", self.epoch, culprit, reason)
                log.warning("the MPS server wrote: %s", "; ".join(told) or "nothing of a fault")
                self._past = self._pids - {r.pid for r in self._successors.values()}
                self._runners = {}
                if self.external:
                    self._start_successors(fallen)
                    self._stop(fallen, grace_secs=0)
                else:
                    self._replace_daemon(fallen)
                self._begin_epoch()
            elif (
                epoch == self.epoch - 1
                and self._culprit == UNNAMED
                and self._is_only_one(culprit, alone=alone)
            ):
                self._culprit = culprit  # the server told of it first
            return {"epoch": self.epoch, "culprit": self._culprit, "reason": self._reason}

    def _replace_daemon(self, fallen: dict[str, GpuRunner]) -> None:
        """Kill our own daemon with its clients, and start another one before the next runners.

        A runner that makes its context without a daemon has no cap. So those that no slice has
        asked for yet are replaced, too.
        """
        since = time.monotonic()
        killed = with_children(self._daemon)  # its servers are its children
        for process in killed:
            process.signal(signal.SIGKILL)
        runners = [*fallen.values(), *self._successors.values()]
        for runner in runners:
            runner.kill()
        self._control.start()
        log.info("another daemon answers after %.2f s", time.monotonic() - since)
        expected = fallen.keys() | self._successors.keys()
        self._successors = {}
        self._start_successors(expected)
        self._start_server()
        deadline = time.monotonic() + _KILLED_SECS
        ending: list[GpuRunner | ProcessId] = [*runners, *killed]
        for each in ending:
            if not each.wait(max(0.0, deadline - time.monotonic())):
                log.warning("pid %d lives %.0f s after it was killed", each.pid, _KILLED_SECS)
        self._killed = frozenset(killed)
        log.info("what was killed has ended after %.2f s", time.monotonic() - since)

    def _start_server(self) -> None:
        """Start the server while the first runners start, and what was killed ends."""
        threading.Thread(target=self._control.start_server, daemon=True).start()

    def _start_successors(self, fallen: Iterable[str]) -> None:
        """Start the next runners of slices while the old ones end."""
        for slice_id in fallen:
            if slice_id not in self._successors:
                self._successors[slice_id] = self._started_anew(slice_id)

    def _is_only_one(self, slice_id: str, *, alone: bool) -> bool:
        """Say whether no kernel and no end of anybody else can have ended the last epoch."""
        others = [lived for s, lived in self._lived.items() if s != slice_id]
        if self.external:  # whose other clients are not known here
            return False
        return not others or (alone and all(others))

    def watch(self) -> None:
        """Fence the GPU where the MPS server tells of a fault or a process of the daemon has ended.

        Clients may learn of either seconds later, or never.
        """
        with self._lock:
            epoch, told = self.epoch, self._server_log.fault(self._past)
            lost = any(not process.alive for process in self._daemon)
        if told:
            time.sleep(_REPORT_SECS)
            self.fence(UNNAMED, "a fatal GPU error, by the log of the MPS server", epoch=epoch)
        elif lost:
            self.fence("the MPS daemon", "it ended", epoch=epoch)
        elif self._has_unlogged_fault():
            time.sleep(_REPORT_SECS)
            self.fence(UNNAMED, "a fatal GPU error, by the status of the MPS server", epoch=epoch)

    def _has_unlogged_fault(self) -> bool:
        """Say once whether a server has come to a fault of which we cannot read."""
        now = time.monotonic()
        if self._server_log.is_readable or now < self._looked_at + _STATUS_SECS:
            return False
        self._looked_at = now
        had_fault, self._had_fault = self._had_fault, self._control.has_fault()
        return self._had_fault and not had_fault

    def _begin_epoch(self) -> None:
        """Watch the daemon as it is now: what it wrote, and who is gone, belongs to the past."""
        self._server_log.forget()
        self._daemon.clear()
        self._see_daemon()
        self._save()

    def _see_daemon(self) -> None:
        found = self._control.processes()
        with self._lock:
            if self.external:  # whose pipe folder need not be in its environment
                self._pids |= set(self._control.servers() or ())
            else:
                self._daemon |= set(found) - self._killed
            self._pids |= {p.pid for p in found}

    def state(self) -> dict[str, Any]:
        """Return what the state file holds."""
        living = [*self._runners.values(), *self._successors.values()]
        runners = [(r.slice_id, r.identity) for r in living]
        return {
            "version": 1,
            "run": self.run,
            "external": self.external,
            "pipe_folder": str(self._control.pipe_folder),
            "epoch": self.epoch,
            "guard": _plain(ProcessId.of(os.getpid())),
            # Those that were seen: to look for them reads the memory of all processes, which takes
            # as long as a driver holds one that was killed.
            "daemon": [_plain(p) for p in list(self._daemon)],
            "runners": [{"slice_id": s} | _plain(i) for s, i in runners if i is not None],
        }

    def _stop(self, runners: dict[str, GpuRunner], *, grace_secs: float) -> None:
        if runners:
            with ThreadPoolExecutor(len(runners)) as pool:
                stopping = runners.values()
                list(pool.map(lambda r: r.stop(self._control, grace_secs=grace_secs), stopping))
        runners.clear()

    def _save(self) -> None:
        """Replace the state file: a reader finds the old one or the new one."""
        write_whole(self._folder / "state.json", json.dumps(self.state(), indent=1), sync=False)


def external_pipe_folder() -> Path:
    """Return where CUDA looks for a daemon that is not ours."""
    return Path(os.environ.get(PIPE_FOLDER) or EXTERNAL_PIPE_FOLDER).absolute()


def clean_orphan(folder: Path, gpu_uuid: str) -> int | None:
    """Stop what a guard that was killed has left: its runners, then its daemon.

    The caller holds the lock of the folder, so that no guard of it lives.

    Returns:
        The epoch that the guard was in, or None where there was none.
    """
    path = folder / "state.json"
    runners: list[ProcessId] = []
    external, pipe_folder, epoch = False, folder / "pipe", 0
    try:
        state = json.loads(path.read_text())
        runners = [ProcessId(r["pid"], r["start_ticks"]) for r in state["runners"]]
        external, pipe_folder = state["external"], Path(state["pipe_folder"])
        epoch = int(state["epoch"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning("%s is unreadable (%s); only the daemon can be cleaned up", path, error)
    control = MpsControl(pipe_folder, folder / "log", gpu_uuid)
    with ThreadPoolExecutor(max(1, len(runners))) as pool:
        list(pool.map(lambda runner: _stop_orphan(runner, control), runners))
    if not external:
        control.quit()
    for left in (*folder.glob("*.sock*"), path):
        left.unlink(missing_ok=True)
    return epoch


def _stop_orphan(runner: ProcessId, control: MpsControl) -> None:
    if runner.wait(GRACE_SECS):  # it ends by itself if its slice is gone
        return
    log.warning("stopping the orphaned runner %d", runner.pid)
    end_client(control, runner.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        runner.signal(number)
        if runner.wait(1.0):
            return


def _plain(process: ProcessId | None) -> dict[str, int]:
    return {} if process is None else {"pid": process.pid, "start_ticks": process.start_ticks}
