"""A process of somebody else on a GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tunerd.slices.mps.gpu_runner import runner_environment

# A context, and more memory than a run of one slice may hold.
_PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def do(function, *arguments):
    status = getattr(cuda, function)(*arguments)
    assert status == 0, f"{function}: {status}"
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
do("cuInit", 0)
do("cuDeviceGet", ctypes.byref(device), 0)
do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
do("cuCtxSetCurrent", context)
do("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(6 << 30))
print("there", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def stranger_on(gpu_uuid: str) -> Iterator[None]:
    """Start a process that holds 6 GiB of a GPU, without MPS; it has ended afterwards."""
    with tempfile.TemporaryDirectory() as no_daemon:
        elsewhere = {"CUDA_MPS_PIPE_DIRECTORY": no_daemon, "CUDA_VISIBLE_DEVICES": gpu_uuid}
        with subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env=runner_environment() | elsewhere,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:  # ends with its standard input
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield
