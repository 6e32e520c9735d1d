"""A process that has imported what others need, and becomes each of them by a fork.

A start takes milliseconds so, where imports take a second of a core, and what was imported is in
memory once. Here is the program; `forks` starts it and asks it.

    python -m tunerd.system.fork_server MODULE ARGUMENT...

It imports MODULE and calls its preload(ARGUMENT...), which must start no thread and touch no
device. Its standard input is a socket that keeps messages apart, each an object of JSON:

    it:   ready        pid
    they: command, environment, and two descriptors: standard input; output and errors
    it:   started      pid, and a descriptor of the process: pidfd_open(2)
          refused      why
    it:   ended        pid, status as Popen tells it

A command is a Python program's, without options of the interpreter: ["-m", MODULE, ARGUMENT...] or
[FILE, ARGUMENT...]. Its process has a session of its own, and ends as any program does. This one
ends with the socket, and its forks go on.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

MESSAGE_BYTES = 192 << 10  # a message is in the system's memory at once: net.core.wmem_default
_DESCRIPTORS = 2


class Server:
    """Forks in the one thread of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._events = selectors.DefaultSelector()
        self._events.register(connection, selectors.EVENT_READ)
        self._forks: dict[int, int] = {}  # by the descriptor of each: its pid

    def serve(self) -> Callable[[], None] | None:
        """Serve to the end of the connection; in a fork, return what it is to do."""
        self._tell({"ready": os.getpid()})
        while True:
            for key, _ in self._events.select():
                if key.fd in self._forks:
                    self._reap(key.fd)
                    continue
                try:
                    found = socket.recv_fds(self._connection, MESSAGE_BYTES, _DESCRIPTORS)
                except OSError:
                    return None
                if not found[0]:
                    return None
                work = self._start(json.loads(found[0]), found[1])
                if work is not None:
                    return work

    def _start(
        self, asked: dict[str, Any], descriptors: Sequence[int]
    ) -> Callable[[], None] | None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"refused": f"fork: {error}"})
            pid = -1
        if pid == 0:
            self._leave()
            _enter(asked["environment"], *descriptors)
            return lambda: _run(asked["command"])
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            fork = os.pidfd_open(pid)
            self._forks[fork] = pid
            self._events.register(fork, selectors.EVENT_READ)
            self._tell({"started": pid}, fork)
        return None

    def _reap(self, fork: int) -> None:
        pid = self._forks.pop(fork)
        self._events.unregister(fork)
        os.close(fork)
        _, status = os.waitpid(pid, 0)
        self._tell({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _tell(self, message: dict[str, Any], *descriptors: int) -> None:
        said = json.dumps(message).encode()
        with contextlib.suppress(OSError):  # the other side is gone, which is found out by reading
            socket.send_fds(self._connection, [said], descriptors)

    def _leave(self) -> None:
        """Close, in a fork, what is this process's."""
        self._events.close()
        self._connection.close()
        for fork in self._forks:
            os.close(fork)


def _enter(environment: dict[str, str], stdin: int, output: int) -> None:
    """Have a fork look as a program does that was started."""
    os.setsid()
    for source, targets in ((stdin, (0,)), (output, (1, 2))):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this decides when it ends
    module, *arguments = sys.argv[1:]
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    importlib.import_module(module).preload(*arguments)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.exit(f"{module} has started {threads - 1} threads, which a fork would not have")
    gc.collect()
    gc.freeze()  # or the first collection of each fork would copy what all of them share
    work = Server(connection).serve()
    if work is not None:
        work()


if __name__ == "__main__":
    main()
