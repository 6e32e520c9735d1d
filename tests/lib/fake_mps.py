"""A control daemon and a runner for the guard's tests, as scripts written into a folder.

The control answers the commands of the real one; clients register by a file in its pipe folder.
Both append to one journal, in the order in which things happen.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tunerd.system.processes import ProcessId

LEFT_SECS = 15.0  # after which nothing is left of slices whose holder has ended

_CONTROL = r"""#!{python} -SE
import os, socket, subprocess, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
path = os.path.join(pipe, "control")

def journal(line):
    with open({journal!r}, "a") as file:
        file.write(line + "\n")

def alive(pid):
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False

def clients():
    return [int(n[7:]) for n in os.listdir(pipe) if n.startswith("client-") and alive(int(n[7:]))]

def answer(command):
    words = command.split()
    if words[0] == "get_server_list":
        return "%d\n" % os.getpid() if clients() else ""
    if words[0] == "get_client_list":
        shift = 100000 if os.path.exists(os.path.join(pipe, "other-namespace")) else 0
        late = os.path.join(pipe, "late")  # as many times as it has bytes, the newest is missing
        missing = os.path.exists(late) and os.path.getsize(late) > 0
        if missing:
            os.truncate(late, os.path.getsize(late) - 1)
        listed = sorted(clients())[: -1 if missing else None]
        return "".join("%d\n" % (pid + shift) for pid in listed)
    if words[0] == "get_server_status":
        return "FAULT\n" if os.path.exists(os.path.join(pipe, "fault")) else "ACTIVE\n"
    if words[0] == "start_server":
        with open(os.path.join(pipe, "server-of-" + words[2]), "w") as file:
            file.write(str(os.getpid()))
        return ""
    if words[0] == "terminate_client":
        journal("terminate " + words[2])
        return ""
    return "unknown command\n"

if sys.argv[1:] == ["-d"]:
    assert os.environ["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
    hangs = os.path.join(pipe, "hangs")  # as many times as it has bytes
    if os.path.exists(hangs) and os.path.getsize(hangs) > 0:
        os.truncate(hangs, os.path.getsize(hangs) - 1)
        time.sleep(60)
    subprocess.Popen([sys.executable, "-SE", sys.argv[0], "serve"], start_new_session=True)
elif sys.argv[1:] == ["serve"]:
    journal("daemon start")
    for past in ("refused", "fault"):
        if os.path.exists(os.path.join(pipe, past)):
            os.unlink(os.path.join(pipe, past))
    server = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):
        os.unlink(path)
    server.bind(path)
    server.listen(16)
    while True:
        connection, _ = server.accept()
        with connection:
            command = connection.recv(4096).decode().strip()
            if not command:  # it was killed itself
                continue
            if command.startswith("quit"):
                journal("quit with %d clients" % len(clients()))
                break
            connection.sendall(answer(command).encode())
    os.unlink(path)
elif command := sys.stdin.read():  # none, where whoever asks was killed before it had asked
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(path)
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    client.sendall(command.encode())
    while data := client.recv(4096):
        sys.stdout.write(data.decode())
"""

_RUNNER = r"""
import json, os, signal, socket, struct, sys, time
def journal(line):
    with open({journal!r}, "a") as file:
        file.write(line + "\n")

def ended(*_):
    journal("signal %d" % os.getpid())
    os._exit(1)

signal.signal(signal.SIGTERM, ended)
mode = os.environ.get("FAKE_MODE", "")
if mode == "crash":
    sys.exit("cannot load the CUDA driver")
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[sys.argv.index("--socket") + 1])
server.listen(1)
connection, _ = server.accept()
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
is_client = os.path.exists(pipe + "/control")  # without a daemon CUDA gives the whole GPU
if is_client:
    open(pipe + "/client-%d" % os.getpid(), "w").close()

def read(size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            journal("end %d" % os.getpid())
            sys.exit()
        data += more
    return data

def answer(body):
    header = json.dumps({"body": body, "blobs": []}).encode()
    connection.sendall(struct.pack("<Q", len(header)) + header)

while mode == "slice":
    (size,) = struct.unpack("<Q", read(8))
    message = json.loads(read(size))
    libraries = [read(size) for size in message["blobs"]]
    if message["body"]["op"] == "close":
        break
    if message["body"]["op"] == "prove":
        refused = pipe + "/refused"  # so many, or until a restart
        if os.path.exists(refused) and os.path.getsize(refused) > 0:
            os.truncate(refused, os.path.getsize(refused) - 1)
            answer({"error": "RuntimeError: CUDA: " + os.environ["FAKE_REFUSAL"]})
            continue
        facts = json.loads(os.environ["FAKE_FACTS"]) | {"pid": os.getpid()}
        if not is_client:
            facts |= {"mps_enabled": False, "sm_count": facts["device_sm_count"]}
        answer({"facts": facts})
    for library in libraries:
        answer({"starting": ""})
        if library == b"hang":
            journal("hang %d" % os.getpid())
            time.sleep(600)
        if library == b"slow":
            time.sleep(1)
        if library == b"crash":
            os.abort()
        if library == b"killed":
            os.kill(os.getpid(), signal.SIGKILL)
        told = {
            b"terminated": "MPS_CLIENT_TERMINATED",
            b"no daemon": "MPS_RPC_FAILURE",
            b"misaligned": "MISALIGNED_ADDRESS",
        }.get(library)
        if told:
            message = "CUDA_ERROR_" + told + "; its context is dead"
            answer({"result": {"failure": {"stage": "run", "kind": "crash", "message": message}}})
            continue
        answer({"result": {"calls": 1, "run_secs": [1e-6]}})
if mode == "slice":
    sys.exit()
header = json.dumps({"body": dict(os.environ), "blobs": []}).encode()
connection.sendall(struct.pack("<Q", len(header)) + header)
while mode == "hang":
    time.sleep(60)
connection.recv(1)
journal("end %d" % os.getpid())
"""


def left(processes: Iterable[ProcessId]) -> list[ProcessId]:
    """Wait for processes that nobody holds any more; return those that outlive the promise."""
    deadline = time.monotonic() + LEFT_SECS
    return [p for p in processes if not p.wait(max(0.0, deadline - time.monotonic()))]


class FakeMps:
    """Scripts in `folder`: put `folder / "bin"` first on PATH, and give `runner_command` on."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._journal.touch()
        self.bin = folder / "bin"
        self.bin.mkdir()
        control = self.bin / "nvidia-cuda-mps-control"
        control.write_text(_fill(_CONTROL, self._journal))
        control.chmod(control.stat().st_mode | stat.S_IXUSR)
        runner = folder / "fake_runner.py"
        runner.write_text(_fill(_RUNNER, self._journal))
        self.runner_command = (sys.executable, "-SE", str(runner))

    @property
    def path(self) -> str:
        return f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def journal(self) -> list[str]:
        return self._journal.read_text().splitlines()


def _fill(text: str, journal: Path) -> str:
    return text.replace("{python}", sys.executable).replace("{journal!r}", repr(str(journal)))
