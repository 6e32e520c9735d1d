"""What the process of a runner imports before anybody asks it: most of what its start takes.

Nothing here starts a thread or touches a device: a fork server has it, too, and the guard of a GPU
may be clearing that while its next runners import.
"""

from __future__ import annotations

import contextlib

from tunerd.system.without_torch import keep_torch_from_tvm


def preload(device: str) -> None:
    """Import what a runner of a device, cuda or cpu, needs."""
    keep_torch_from_tvm()
    with contextlib.suppress(Exception):  # the proof will tell
        from tunerd.runner import cuda_device, tvm_runtime

        tvm_runtime.import_runtime()
        if device == "cuda":
            cuda_device.preload()
    from tunerd.runner import service  # noqa: F401
