"""A job of a trace on real devices: an artifact that is run so many times, beside held memory.

    PYTHONPATH=.:scripts python3 -m lab.placement.work ARTIFACT --calls 1000 --hold-gib 6

It ends with 1 where the device has not the memory, as other programs do. With --secs it runs for so
long. It prints as JSON how many seconds loading, the first call and holding memory took, and how
many calls it made per second.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import tunerd
from tunerd.colocation.artifacts import sample_inputs
from tunerd.system.without_torch import keep_torch_from_tvm

_STEP = 1 << 30  # bytes held at once


def hold(gib: float) -> list[Any]:
    """Take so much memory of the first GPU, whose context is there. Raises RuntimeError."""
    from cuda.bindings import driver

    from tunerd.system.cuda_driver import checked

    sizes = [_STEP] * int(gib) + [int((gib % 1) * _STEP)]
    return [checked(driver.cuMemAlloc(size)) for size in sizes if size]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--calls", type=int)
    parser.add_argument("--secs", type=float, default=2.0)
    parser.add_argument("--hold-gib", type=float, default=0.0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", tunerd.MismatchWarning)
    keep_torch_from_tvm()  # it has no tensors of PyTorch's, and seconds would go by
    moments = [time.monotonic()]
    model, inputs = tunerd.load(options.artifact), sample_inputs(options.artifact)
    moments.append(time.monotonic())
    model(inputs)
    moments.append(time.monotonic())
    kept = hold(options.hold_gib)
    moments.append(time.monotonic())
    began, calls = moments[-1], 0
    while calls < options.calls if options.calls else time.monotonic() - began < options.secs:
        model(inputs)
        calls += 1
    del kept
    steps = ("load_secs", "first_call_secs", "hold_secs")
    said = {name: b - a for name, a, b in zip(steps, moments, moments[1:], strict=False)}
    print(json.dumps(said | {"calls_per_sec": calls / (time.monotonic() - began)}))


if __name__ == "__main__":
    main()
