"""What this machine can do, checked by trying: the findings behind `tunerd doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from tunerd.errors import HostError, TunerdError
from tunerd.libraries.packages import PACKAGES, missing, wheel_version
from tunerd.system import host, spawn
from tunerd.system.host import HostFacts
from tunerd.vocabulary import SliceRequest

# The versions that work together, as in pyproject.toml; a test compares the two.
PINS = {
    "apache-tvm": "==0.27.0.post1",
    "apache-tvm-ffi": "==0.1.14.post0",
    "ray": ">=2.55,<3",
}
RAY_DASHBOARD_PORT = 8265  # Ray's default; whoever reaches it can run code as its user
_SHOWN_SHARES = (5, 10, 20, 25, 33, 40, 50, 75, 100)
_PROBED_PCT = 40
_IMPORT_SECS = 120.0
_GENERATE_CODE = """
from tunerd.system import host, targets, without_torch
without_torch.keep_torch_from_tvm()
print(targets.cpu_target_json(1).json)
"""


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, or is needed for some uses only
    UNUSED = "-"  # of GPUs, where there is none
    FAIL = "fail"  # nothing can be tuned


@dataclass(frozen=True)
class Finding:
    """One fact about the machine, and what to do where it is not as it should be."""

    name: str
    status: Status
    fact: str
    fix: str = ""
    gpu_only: bool = False  # nothing that tuning for CPUs needs


def check() -> list[Finding]:
    """Check everything; takes some seconds, with a GPU as long as a slice takes to start."""
    facts = host.facts()
    everywhere: _Checks = (_cores, _memory, _packages, _bytecode, _tvm, _linker, _ray, _dashboard)
    for_gpus: _Checks = (
        _gpus,
        _cuda_libraries,
        _kernel_libraries,
        _mps_binary,
        _other_daemons,
        _attach,
    )
    found = [finding for each in everywhere for finding in each(facts)]
    for each in for_gpus:
        found += [dataclasses.replace(finding, gpu_only=True) for finding in each(facts)]
    return found


_Checks = tuple[Callable[[HostFacts], Iterator[Finding]], ...]


# --- needed everywhere -------------------------------------------------------------------------


def _cores(facts: HostFacts) -> Iterator[Finding]:
    quota = "no quota" if facts.core_quota is None else f"a quota of {facts.core_quota:g}"
    threads = max((len(group) for group in facts.core_siblings), default=1)
    fact = (
        f"{facts.usable_cores} usable of {os.cpu_count()}: affinity to {len(facts.cores)}, {quota},"
        f" {threads} thread(s) per core; {facts.cpu_model}"
    )
    if facts.usable_cores < 2:
        fix = "a core searches or measures at a time: give this machine or container two or more"
        yield Finding("cores", Status.WARN, fact, fix)
    else:
        yield Finding("cores", Status.OK, fact)


def _memory(facts: HostFacts) -> Iterator[Finding]:
    gib = facts.mem_bytes / (1 << 30)
    enough = gib >= 1 + facts.usable_cores  # a tuner process with TVM takes about one
    status = Status.OK if enough else Status.WARN
    fix = "" if enough else "about 1 GiB per tuner process is used; give --tuners a small number"
    yield Finding("memory", status, f"{gib:.1f} GiB", fix)


def _packages(facts: HostFacts) -> Iterator[Finding]:
    found = dict(facts.packages)
    wrong = {n: found.get(n) for n, pin in PINS.items() if not _is_within(found.get(n), pin)}
    if wrong:
        fact = ", ".join(f"{name} {version or 'missing'}" for name, version in wrong.items())
        wanted = " ".join(_requirement(name) for name in wrong)
        fix = f"pip install {wanted}"
        if "apache-tvm-ffi" in wrong:
            fix += " (with apache-tvm-ffi 0.1.15 this TVM crashes)"
        yield Finding("packages", Status.FAIL, fact, fix)
    else:
        fact = ", ".join(f"{name} {version}" for name, version in facts.packages)
        yield Finding("packages", Status.OK, f"Python {facts.python}, {fact}")


def _is_within(version: str | None, pin: str) -> bool:
    from packaging.specifiers import SpecifierSet  # which Ray needs, too

    return version is not None and SpecifierSet(pin).contains(version, prereleases=True)


def _requirement(name: str) -> str:
    """Return what pip is asked for, quoted where a shell would take `<` for its own."""
    asked = name + PINS[name]
    return f"'{asked}'" if "<" in asked else asked


def _bytecode(facts: HostFacts) -> Iterator[Finding]:
    """A start is some twenty processes: with bytecode Ray is there in half the time."""
    if not facts.not_compiled:
        yield Finding("bytecode", Status.OK, "modules are compiled once")
        return
    why = "PYTHONDONTWRITEBYTECODE" if sys.dont_write_bytecode else "a folder that is read-only"
    have, them = ("have", "them") if len(facts.not_compiled) > 1 else ("has", "it")
    found = map(importlib.util.find_spec, facts.not_compiled)
    folders = {_compiled_with(Path(spec.origin)) for spec in found if spec and spec.origin}
    yield Finding(
        "bytecode",
        Status.WARN,
        f"{', '.join(facts.not_compiled)} {have} none, and {why} keeps it so: every process of a"
        f" run compiles {them} again, which takes seconds of each start",
        f"{sys.executable} -m compileall -q {' '.join(sorted(folders))}, or install with pip, or"
        " with uv and --compile-bytecode",
    )


def _compiled_with(package: Path) -> str:
    """Return the folder to compile for a package, given by its __init__.py.

    What is installed lacks bytecode together with what it imports; beside a package that is not
    installed lies anything, a virtual environment for example.
    """
    installed = package.parents[1]
    is_installed = installed.name in ("site-packages", "dist-packages")
    return str(installed if is_installed else package.parent)


def _tvm(_: HostFacts) -> Iterator[Finding]:
    # In a process of its own: a wrong pair of TVM and tvm-ffi crashes the interpreter.
    answer = _python(_GENERATE_CODE)
    if answer.ok:
        yield Finding("TVM", Status.OK, f"loads, and generates code for {answer.text}")
    else:
        fix = "reinstall it: pip install --force-reinstall " + " ".join(
            _requirement(name) for name in PINS if name.startswith("apache")
        )
        yield Finding("TVM", Status.FAIL, f"does not load: {answer.text}", fix)


def _linker(_: HostFacts) -> Iterator[Finding]:
    """Builds are linked, by ld or by a compiler that calls it."""
    programs = ("c++", "g++", "clang++", "cc", "gcc", "clang")
    compiler = next((path for name in programs if (path := shutil.which(name))), None)
    fix = "install one, for example: apt-get install g++"
    if compiler is None:
        linker = shutil.which("ld")
        fact = "no C or C++ compiler on PATH" + (f"; {linker} links builds" if linker else "")
        yield Finding("C++ compiler", Status.WARN if linker else Status.FAIL, fact, fix)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cc"), Path(folder, "probe.so")
        source.write_text('#include <cmath>\nextern "C" float probe(float x) { return expf(x); }\n')
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fact = f"{compiler} builds no shared library: {done.stderr.strip()[-300:]}"
        yield Finding("C++ compiler", Status.FAIL, fact, fix)
    else:
        yield Finding("C++ compiler", Status.OK, compiler)


def _ray(_: HostFacts) -> Iterator[Finding]:
    answer = _python("import ray; print(ray.__version__)")
    if answer.ok:
        yield Finding("Ray", Status.OK, f"{answer.text} imports in {answer.secs:.1f} s")
    else:
        fix = f"pip install {_requirement('ray')}"
        yield Finding("Ray", Status.FAIL, f"does not import: {answer.text}", fix)


def _dashboard(_: HostFacts) -> Iterator[Finding]:
    addresses = listening(RAY_DASHBOARD_PORT)
    if not addresses:
        fact = f"nothing listens on port {RAY_DASHBOARD_PORT}"
        yield Finding("Ray dashboard", Status.OK, fact)
        return
    where = "this machine alone" if all(map(_is_loopback, addresses)) else "the network"
    yield Finding(
        "Ray dashboard",
        Status.WARN,
        f"port {RAY_DASHBOARD_PORT} is open to {where}: if that is a Ray dashboard, who reaches it"
        " can run code here",
        "stop it, or start it with RAY_AUTH_MODE=token and --dashboard-host 127.0.0.1",
    )


# --- needed for GPUs ---------------------------------------------------------------------------


def _gpus(facts: HostFacts) -> Iterator[Finding]:
    if facts.no_gpu and not facts.failed_gpus:
        fact = f"none: {facts.no_gpu}"
        yield Finding("GPU", Status.UNUSED, fact, "nothing, to tune for CPUs (--cpu-pct)")
        return
    fact = f"{facts.driver}, supports CUDA {facts.cuda_version}"
    yield Finding("driver", Status.OK, fact)
    from tunerd.slices.mps.mps_slice import expected_sms, problem_of

    for gpu in facts.gpus:
        problem = problem_of(gpu)
        fact = (
            f"{gpu.name}, {gpu.mem_bytes >> 30} GiB, compute capability {gpu.compute_capability},"
            f" mode {gpu.compute_mode}, {gpu.uuid}"
        )
        status = Status.FAIL if problem else Status.OK
        yield Finding(f"GPU {gpu.index}", status, fact, problem)
        if gpu.sm_count is not None:
            sms = ", ".join(f"{p}%: {expected_sms(gpu.sm_count, p)}" for p in _SHOWN_SHARES)
            yield Finding(f"GPU {gpu.index}: SMs per share", Status.OK, sms)
    for failed in facts.failed_gpus:
        status = Status.WARN if facts.gpus else Status.FAIL
        fix = (
            "reset it or restart the machine (dmesg | grep Xid tells more), or hide it with"
            " CUDA_VISIBLE_DEVICES"
        )
        yield Finding(f"GPU {failed.index}", status, failed.problem, fix)


def _cuda_libraries(facts: HostFacts) -> Iterator[Finding]:
    from tunerd.builder.nvrtc import missing_for_builds

    missing = missing_for_builds()
    fix = host.install_command("cuda")
    if missing is None:
        yield Finding("CUDA libraries", Status.OK, "NVRTC, cudart and headers found")
    elif facts.gpus:
        yield Finding("CUDA libraries", Status.FAIL, missing, fix)
    else:
        yield Finding("CUDA libraries", Status.UNUSED, missing, f"only for GPUs: {fix}")


def _kernel_libraries(facts: HostFacts) -> Iterator[Finding]:
    for package in PACKAGES.values():
        if lacking := missing(package.name):
            use = f"only for --libraries {package.name}, and for artifacts that it gave kernels"
            status = Status.WARN if facts.gpus or facts.failed_gpus else Status.UNUSED
            yield Finding(package.title, status, f"not needed: {use}", lacking)
        else:
            yield Finding(package.title, Status.OK, wheel_version(package.name) or "found")


def _mps_binary(facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if facts.mps_control:
        yield Finding("MPS", Status.OK, facts.mps_control)
    else:
        from tunerd.slices.mps.mps_slice import NO_MPS_CONTROL

        yield Finding("MPS", Status.FAIL, f"{host.MPS_CONTROL} is not on PATH", NO_MPS_CONTROL)


def _other_daemons(facts: HostFacts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    others = mps_processes()
    if not others:
        yield Finding("other MPS daemons", Status.OK, "none")
        return
    who = ", ".join(f"pid {pid} of uid {uid}" for pid, uid in others)
    if shared := multi_user_daemons():
        yield Finding(
            "multi-user MPS server",
            Status.WARN,
            f"pid {shared[0]} lets clients of all users into one server: a fault of anybody's ends "
            "everybody's, and its user can end any of them",
            "start it without -multiuser-server, or keep others off this machine while you tune",
        )
    yield Finding(
        "other MPS daemons",
        Status.WARN,
        f"{who}: their clients and ours take turns on a GPU, which disturbs measurements",
        "stop them while you tune, or join one of yours with --mps external",
    )


def _attach(facts: HostFacts) -> Iterator[Finding]:
    """Start a real slice on each GPU and look at what it obtains."""
    from tunerd.slices.mps.mps_slice import MpsSlice, plan_for, usability_of

    usable = usability_of(facts)
    if not facts.gpus:
        return
    if not usable.ok:
        yield Finding(
            "MPS slices", Status.FAIL, usable.why, "only slices of the kind `whole` work here"
        )
        return
    try:
        plan = plan_for(facts, SliceRequest("mps", _PROBED_PCT, per_device=1))
    except HostError as error:
        yield Finding("slice", Status.FAIL, str(error), "mend that: slices of GPUs need it")
        return
    if plan.problem:
        yield Finding("slice", Status.FAIL, plan.problem)
    for spec in plan.slices:
        name = f"slice of {_PROBED_PCT}% of GPU {spec.device_index}"
        started = time.monotonic()
        try:
            with MpsSlice(spec) as measured:
                proof = measured.prove()
        except TunerdError as error:
            yield Finding(name, Status.FAIL, str(error), "see the logs of the GPU guard and of MPS")
            continue
        yield Finding(
            name,
            Status.OK,
            f"attached, {proof.sm_count} of {proof.device_sm_count} SMs obtained, ready in"
            f" {time.monotonic() - started:.1f} s",
        )


# --- how things are found out ------------------------------------------------------------------


@dataclass(frozen=True)
class _Answer:
    ok: bool
    text: str
    secs: float


def _python(code: str) -> _Answer:
    """Run code in a fresh interpreter; the last line it prints, or why it failed."""
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=spawn.environment(),
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECS,
        )
    except subprocess.TimeoutExpired:
        return _Answer(False, f"no answer within {_IMPORT_SECS:.0f} s", _IMPORT_SECS)
    secs = time.monotonic() - started
    if done.returncode < 0:
        return _Answer(False, f"it was ended by signal {-done.returncode}", secs)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return _Answer(done.returncode == 0, lines[-1] if lines else "", secs)


def listening(port: int) -> list[str]:
    """Return the local addresses on which TCP `port` is listened."""
    found = psutil.net_connections("tcp")
    return [c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def mps_processes() -> list[tuple[int, int]]:
    """Return (pid, uid) of the MPS daemons and servers that run now, any user's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if program_of(process.pid).startswith("nvidia-cuda-mps"):
                found.append((process.pid, process.uids().effective))
    return found


def multi_user_daemons() -> list[int]:
    """Return the pids of MPS daemons whose servers take clients of several users.

    `-multiuser-server` of nvidia-cuda-mps-control (NVIDIA's MPS guide, "Multi-user server").
    """
    multi_user = "multiuser-server"
    return [p for p, _ in mps_processes() if multi_user in (w.lstrip("-") for w in _command(p))]


def program_of(pid: int) -> str:
    """Return the name of a process's program as it was started; "" where it has ended."""
    return os.path.basename(next(iter(_command(pid)), ""))


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []
