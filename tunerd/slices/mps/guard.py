"""The guard of one GPU: owns its MPS daemon and its runners, outside of everybody's process tree.

Started by `lease.acquire`. It leaves its starter's tree by a double fork, because Ray kills the
children of an actor, and a GPU client that is killed kills its neighbours.

The lease is the connections. A slice keeps its connection open; when one ends, however it ends, the
runners started through it are stopped, and when there has been none for a while the guard stops the
daemon and exits. Who starts a guard with runners that it expects holds a lease by its standard
input. A guard that was killed itself is found by its state file, and cleaned up after,
by the next one.

Requests, one JSON object each in the frames of `wire`; answers are {"ok": ...} or {"error": ...}:

    hello         run, pipe_folder                 must come first; "busy" for another live run
    start_runner  spec                             -> socket, pid, epoch
    runner        slice_id                         -> exit_status (null while it lives), log
    attached      pid                              -> attached: true, false or null (unknown)
    own           slice_id                         -> what of the GPU is this run's: `tenants.Own`
    stop_runner   slice_id, grace_secs
    fence         slice_id, epoch, scope, reason,
                  shared, alone                    -> epoch, culprit, reason
    state                                          -> what the state file holds
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tunerd.errors import HostError, InfrastructureError, TunerdError
from tunerd.runner.host import RUNNER_COMMAND
from tunerd.slices.mps.gpu import GRACE_SECS, Gpu
from tunerd.slices.mps.gpu_runner import GpuRunner
from tunerd.system import wire
from tunerd.vocabulary import SliceSpec

log = logging.getLogger(__name__)

LINGER_SECS = 3.0  # from the end of the last connection to the end of the daemon
FIRST_LEASE_SECS = 30.0  # how long a new guard waits for its first connection
_TICK_SECS = 0.2


class Guard:
    """Answers the slices of one GPU, a thread per connection, and counts them as leases."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._leases: dict[int, list[GpuRunner]] = {}  # by connection: the runners it started
        self._draining: set[int] = set()  # leases whose connection has ended
        self._connections = 0
        self._expires_at = time.monotonic() + FIRST_LEASE_SECS
        self._expired = False
        self._lock = threading.Lock()  # no lease is given once the end has begun

    def lend_to_starter(self, stdin: int) -> None:
        """Count an open pipe as a lease, until whoever started this guard closes its end of it."""
        self._leases[0] = []  # connections count from 1
        threading.Thread(target=self._await_starter, args=(stdin,), daemon=True).start()

    def _await_starter(self, stdin: int) -> None:
        with os.fdopen(stdin, "rb") as pipe:
            pipe.read()
        self._drain(0)

    def serve_until_expired(self, listener: socket.socket, stop: threading.Event) -> None:
        """Accept connections until nobody has held one for a while, or until told to stop."""
        listener.settimeout(_TICK_SECS)
        ended = threading.Event()
        watch = threading.Thread(target=self._watch, args=(ended,))
        watch.start()
        try:
            while not stop.is_set() and not self._expire():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                connection.settimeout(None)
                self._connections += 1
                arguments = (connection, self._connections)
                threading.Thread(target=self._serve, args=arguments, daemon=True).start()
        finally:
            ended.set()
            watch.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_SECS):
            try:
                self._gpu.watch()
            except (TunerdError, OSError):  # slices hear of it when they start their runners
                log.exception("the GPU could not be fenced")

    def _expire(self) -> bool:
        with self._lock:
            self._expired = not self._leases and time.monotonic() > self._expires_at
            return self._expired

    def _serve(self, connection: socket.socket, number: int) -> None:
        """Answer one connection until it ends, then drain the runners that it started."""
        try:
            with connection:
                hello, _ = wire.receive(connection)
                refusal = self._refusal(hello)
                if refusal is not None:
                    wire.send(connection, refusal)
                    return
                with self._lock:
                    if self._expired:
                        return
                    self._leases[number] = []
                wire.send(connection, {"ok": self._gpu.state()})
                while True:
                    body, _ = wire.receive(connection)
                    wire.send(connection, self._answer(body, number))
        except (OSError, ValueError, LookupError, TypeError) as error:
            log.info("connection %d: %s", number, error)
        finally:
            if number in self._leases:
                self._drain(number)

    def _refusal(self, hello: dict[str, Any]) -> dict[str, Any] | None:
        if hello["op"] != "hello":
            return {"error": f"the first request is '{hello['op']}', not hello"}
        if (hello["run"], hello["pipe_folder"]) == (self._gpu.run, str(self._gpu.pipe_folder)):
            return None
        # Without a live lease it is about to end: the caller waits for that.
        live = len(self._leases) - len(self._draining)
        return {"busy": {"pid": os.getpid(), "run": self._gpu.run, "leases": live}}

    def _drain(self, number: int) -> None:
        # The lease counts until its runners are gone; the linger counts from the connection's end.
        self._expires_at = time.monotonic() + LINGER_SECS
        self._draining.add(number)
        runners = self._leases[number]
        try:
            with ThreadPoolExecutor(max(1, len(runners))) as pool:
                list(pool.map(lambda r: self._gpu.stop(r, grace_secs=GRACE_SECS), runners))
        finally:
            del self._leases[number]
            self._draining.discard(number)

    def _answer(self, body: dict[str, Any], number: int) -> dict[str, Any]:
        fields = dict(body)
        operation = str(fields.pop("op", ""))
        answer = _REQUESTS.get(operation)
        if answer is None:
            return {"error": f"the guard knows no request '{operation}'"}
        try:
            return {"ok": answer(self, number, **fields)}
        except (TunerdError, OSError, LookupError, TypeError, ValueError) as error:
            log.exception("%s", body)
            return {"error": f"{operation}: {error}"}

    def _start_runner(self, number: int, *, spec: dict[str, Any]) -> dict[str, Any]:
        runner = self._gpu.start_runner(SliceSpec.from_json(spec))
        self._leases[number].append(runner)
        return {"socket": str(runner.socket_path), "pid": runner.pid, "epoch": self._gpu.epoch}

    def _runner(self, _: int, *, slice_id: str) -> dict[str, Any]:
        runner = self._gpu.runner(slice_id)
        if runner is None:
            return {"exit_status": 0, "log": "it was stopped"}
        return {"exit_status": runner.exit_status, "log": runner.log_tail()}

    def _attached(self, _: int, *, pid: int) -> dict[str, Any]:
        return {"attached": self._gpu.attached(pid)}

    def _own(self, _: int, *, slice_id: str) -> dict[str, Any]:
        own = self._gpu.own(slice_id)
        return dataclasses.asdict(own) | {"pids": sorted(own.pids)}

    def _stop_runner(
        self, _: int, *, slice_id: str, grace_secs: float = GRACE_SECS
    ) -> dict[str, Any]:
        runner = self._gpu.runner(slice_id)
        if runner is not None:
            self._gpu.stop(runner, grace_secs=grace_secs)
        return {"epoch": self._gpu.epoch}

    def _fence(
        self,
        number: int,
        *,
        slice_id: str,
        epoch: int,
        scope: str,
        reason: str,
        **how: bool,
    ) -> dict[str, Any]:
        if scope == "gpu":
            return self._gpu.fence(slice_id, reason, epoch=epoch, **how)
        self._stop_runner(number, slice_id=slice_id, grace_secs=0)
        return {"epoch": self._gpu.epoch, "culprit": slice_id, "reason": reason}

    def _state(self, _: int) -> dict[str, Any]:
        return self._gpu.state() | {"leases": len(self._leases)}


_REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "start_runner": Guard._start_runner,
    "runner": Guard._runner,
    "attached": Guard._attached,
    "own": Guard._own,
    "stop_runner": Guard._stop_runner,
    "fence": Guard._fence,
    "state": Guard._state,
}


# --- the process -------------------------------------------------------------------------------


def _work(arguments: argparse.Namespace, ready: int, stdin: int) -> None:
    """Be the guard. Writes to `ready`, once, that it is one or why it is not."""
    expected = [SliceSpec.from_json(spec) for spec in json.loads(arguments.expect)]
    folder: Path = arguments.folder
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _tell(ready, {"held": True})
        return
    gpu = Gpu(
        arguments.gpu,
        folder,
        run=arguments.run,
        external=arguments.external,
        runner_command=tuple(json.loads(arguments.runner)),
    )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    listener = socket.socket(socket.AF_UNIX)
    try:
        gpu.open()
        path = folder / "guard.sock"
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(64)
        log.info("guard %d of %s for %s", os.getpid(), arguments.gpu, arguments.run)
        _tell(ready, {"ready": os.getpid()})
        guard = Guard(gpu)
        if expected:
            guard.lend_to_starter(stdin)
        for spec in expected:
            gpu.expect(spec)
        guard.serve_until_expired(listener, stop)
    except (HostError, InfrastructureError, OSError) as error:
        log.exception("the guard cannot work")
        _tell(ready, {"error": str(error), "host": isinstance(error, HostError)})
    finally:
        listener.close()  # first: a newcomer must find nobody rather than a guard that ends
        gpu.close()
        log.info("guard %d ends", os.getpid())


def _tell(ready: int, message: dict[str, Any]) -> None:
    try:
        os.write(ready, json.dumps(message).encode())
        os.close(ready)
    except OSError:  # the starter is gone, or was told before
        pass


def _leave_tree(arguments: argparse.Namespace) -> None:
    """Fork twice into a session of our own; the starter prints what the guard told and ends."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        with os.fdopen(reader) as told:
            sys.stdout.write(told.read())
        return
    os.close(reader)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    os.chdir("/")
    path = arguments.folder / "guard.log"
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    stdin = os.dup(0)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        _work(arguments, writer, stdin)
    except BaseException:
        log.exception("the guard failed")
    finally:
        logging.shutdown()
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tunerd.slices.mps.guard", description=__doc__)
    parser.add_argument("--gpu", required=True, metavar="UUID")
    parser.add_argument("--folder", required=True, type=Path, help="private, of this GPU and user")
    parser.add_argument("--run", required=True, help="which run it works for")
    parser.add_argument("--external", type=Path, metavar="FOLDER", help="use the daemon there")
    parser.add_argument("--runner", default=json.dumps(RUNNER_COMMAND), help="its command, JSON")
    parser.add_argument("--expect", default="[]", help="slices that will come, JSON")
    _leave_tree(parser.parse_args())


if __name__ == "__main__":
    main()
