"""What keeps a run its user's own: sockets, files, and what is run of what is read."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import psutil
import pytest

from tests.lib.gpu_hosts import H200
from tests.lib.models import conv_net
from tests.lib.ray_processes import clean_environment, connections, short_folder
from tests.lib.tune_process import Run
from tunerd.doctor import checks
from tunerd.errors import HostError
from tunerd.slices.mps.guard_client import private_folder
from tunerd.system import host

PACKAGE = Path(checks.__file__).parent


# --- a real run --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seen:
    """A run while it searched."""

    sockets: list[tuple[str, str, int]]  # process, address, port
    folder: Path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("security")
    onnx.save(conv_net(), folder / "net.onnx")
    run = Run(folder / "run", folder / "net.onnx", ("--trials", "8"))
    with short_folder() as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNERD_RUNTIME_FOLDER", str(runtime))
        before = os.umask(0)  # the folder is private whatever the user's mask says
        try:
            run.start()
        finally:
            os.umask(before)
        run.wait_for(lambda: run.measured() >= 2)
        assert run.process is not None
        family = [psutil.Process(run.process.pid), *run.processes()]
        sockets = [
            (process.name(), c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
            for process in family
            for c in connections(process)
            if c.laddr and (c.status == psutil.CONN_LISTEN or c.type == socket.SOCK_DGRAM)
        ]
        code, _, said = run.end()
        assert code < 10, said
    return Seen(sockets, run.folder)


def test_no_process_of_a_run_listens_beyond_loopback(seen: Seen) -> None:
    assert len(seen.sockets) >= 5
    assert {address for _, address, _ in seen.sockets} == {"127.0.0.1"}


def test_a_run_s_folder_is_its_user_s_alone_whatever_the_mask(seen: Seen) -> None:
    assert stat.S_IMODE(seen.folder.stat().st_mode) == 0o700


def test_the_folder_of_sockets_is_its_user_s_alone_whatever_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray opens its own to all: this one, around it, keeps others out.
    monkeypatch.setenv("TUNERD_RUNTIME_FOLDER", str(tmp_path / "new"))
    before = os.umask(0)
    try:
        assert stat.S_IMODE(private_folder().stat().st_mode) == 0o700
    finally:
        os.umask(before)
    (tmp_path / "new").chmod(0o755)
    with pytest.raises(HostError, match="not a folder that only you can enter"):
        private_folder()


def test_a_finished_run_is_read_and_loaded_without_a_pickle(seen: Seen, tmp_path: Path) -> None:
    # Python raises this event whenever an unpickler looks up what it is about to call.
    program = f"""
import sys
found = []
sys.addaudithook(lambda event, _: found.append(event) if event == "pickle.find_class" else None)
import pickle
pickle.loads(pickle.dumps(print))
assert found, "the hook hears nothing"
found.clear()
from pathlib import Path
import tunerd
from tunerd.cli.app import app
from tunerd.cli.errors import run
folder = {str(seen.folder)!r}
tunerd.load(folder + "/artifact")
here = {str(tmp_path)!r}
packed, to = here + "/run.tar.gz", here + "/again"
new = ["tune", folder + "/../net.onnx", "--cpu-pct", "100", "--out", here + "/new", "--dry-run"]
for argv in (["status", folder, "--json"], ["records", "show", folder, "--json"],
             ["records", "pack", folder, packed], ["records", "unpack", packed, to],
             ["records", "merge", folder, "--to", here + "/merged"],
             ["records", "export", folder, "--format", "tvm", "--to", here + "/tvm"],
             ["compare", folder, to], new + ["--warm-start", folder]):
    assert run(app, argv) < 10, argv
print(found, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "[]"), done.stderr


# --- the source --------------------------------------------------------------------------------


def test_no_reader_that_may_unpickle_is_called() -> None:
    readers = re.compile(
        r"read_pickle|to_pickle|torch\.load|np\.load\(|numpy\.load\(|mmap_mode|yaml\.load\("
    )
    for path in PACKAGE.rglob("*.py"):
        assert not readers.search(path.read_text()), path.name


def test_no_text_is_run_as_a_program() -> None:
    runners = re.compile(r"(?<![\w.])(eval|exec)\(|shell=True|os\.system\(|os\.popen\(")
    for path in PACKAGE.rglob("*.py"):
        assert not runners.search(path.read_text()), path.name


# --- doctor ------------------------------------------------------------------------------------


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Have something listen on what doctor takes for the dashboard's port."""
    opened: list[socket.socket] = []

    def listen(address: str) -> None:
        server = socket.create_server((address, 0))
        opened.append(server)
        monkeypatch.setattr(checks, "RAY_DASHBOARD_PORT", server.getsockname()[1])

    yield listen
    for server in opened:
        server.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1", "open to this machine alone"), ("0.0.0.0", "open to the network")],
)
def test_doctor_warns_of_an_open_dashboard(
    address: str, said: str, listening: Callable[[str], None]
) -> None:
    listening(address)
    (finding,) = checks._dashboard(host.facts())
    assert finding.status is checks.Status.WARN
    assert said in finding.fact
    assert "RAY_AUTH_MODE=token" in finding.fix


def test_doctor_finds_no_dashboard_where_nothing_listens(
    listening: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(checks, "RAY_DASHBOARD_PORT", server.getsockname()[1])
    (finding,) = checks._dashboard(host.facts())
    assert finding.status is checks.Status.OK


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("-multiuser-server", ["multi-user MPS server", "other MPS daemons"]),
        ("-d", ["other MPS daemons"]),
    ],
)
def test_doctor_warns_of_an_mps_server_of_several_users(option: str, names: list[str]) -> None:
    facts = dataclasses.replace(host.facts(), gpus=(H200,))
    program = "import sys; print(flush=True); sys.stdin.read()"
    daemon = subprocess.Popen(
        ["nvidia-cuda-mps-control", "-c", program, option],
        executable=sys.executable,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        findings = list(checks._other_daemons(facts))
    finally:
        daemon.communicate()
    assert [f.name for f in findings if f.status is checks.Status.WARN] == names
