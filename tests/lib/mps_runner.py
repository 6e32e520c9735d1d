"""The real runner on this machine's cores, as a client of the fake MPS daemon at a made-up share.

Started by a real guard, with the arguments of a runner for a GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tunerd.runner import process, sampling

DEVICE_SMS = 132


class Client(sampling.CpuDevice):
    """Lists itself with the fake daemon when it is asked for its share, as a context would."""

    def facts(self) -> dict[str, Any]:
        pipe_folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        is_client = (pipe_folder / "control").exists()
        if is_client:
            (pipe_folder / f"client-{os.getpid()}").touch()
        pct = int(os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
        sms = DEVICE_SMS if pct == 100 else DEVICE_SMS * pct // 100 // 2 * 2
        return {
            "device": "a GPU",
            "sm_count": sms,
            "device_sm_count": DEVICE_SMS,
            "mps_enabled": is_client,
            "compute_capability": "9.0",
        }


if __name__ == "__main__":
    sampling.CpuDevice = Client  # type: ignore[misc]
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    sys.argv[sys.argv.index("cuda")] = "cpu"
    sys.argv += ["--cores", cores]
    process.main()
