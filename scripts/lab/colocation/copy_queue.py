#!/usr/bin/env python3
"""How long a copy to a GPU waits for another stream's copies, which were queued before it.

    PYTHONPATH=.:scripts python3 -m lab.colocation.copy_queue --out FOLDER

Copies of pinned memory on two streams: a small one (an image of ResNet-50) alone, behind a large
one (64 of them), and behind the same bytes as parts that were all queued before, and as parts of
which two were. Each is timed from its queueing until the host sees its end, all in turns. Written:
copy_queue.json with all samples, and copy_queue.txt. Runs where an NVIDIA GPU is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from lab.lab import made_by, table, write
from tunerd.colocation.places.gpu_context import GpuContext
from tunerd.system.cuda_driver import checked

SMALL_BYTES = 3 * 224 * 224 * 4
LARGE_BYTES = 64 * SMALL_BYTES
MIB = 1 << 20
# The parts of the large one, and how many of them are queued before the small one.
WAYS: dict[str, tuple[int, int]] = {
    "alone": (LARGE_BYTES, 0),
    "behind a large one": (LARGE_BYTES, 1),
    "behind its parts of 1 MiB": (MIB, LARGE_BYTES // MIB),
    "behind its parts of 256 KiB": (MIB // 4, LARGE_BYTES // (MIB // 4)),
    "behind two parts of 2 MiB": (2 * MIB, 2),
}
TURNS = 40


class Copies:
    def __init__(self) -> None:
        gpu = GpuContext()
        gpu.make_current()
        self._gpu, driver = gpu, gpu._driver
        self.driver = driver
        sizes = (SMALL_BYTES, LARGE_BYTES)
        self._here = [int(checked(driver.cuMemHostAlloc(size, 1))) for size in sizes]
        self._there = [int(checked(driver.cuMemAlloc(size))) for size in sizes]
        self._streams = [gpu.stream() for _ in sizes]

    def sample(self, part_bytes: int, parts: int) -> float:
        """Return the seconds of the small copy behind so many parts of the large one."""
        driver, (small, large) = self.driver, self._streams
        for nth in range(parts):
            at = nth * part_bytes
            size = min(part_bytes, LARGE_BYTES - at)
            copy = driver.cuMemcpyHtoDAsync(self._there[1] + at, self._here[1] + at, size, large)
            checked(copy)
        since = time.perf_counter()
        checked(driver.cuMemcpyHtoDAsync(self._there[0], self._here[0], SMALL_BYTES, small))
        checked(driver.cuStreamSynchronize(small))
        took = time.perf_counter() - since
        checked(driver.cuStreamSynchronize(large))
        return took


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    copies = Copies()
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(TURNS + 1):
        for name in list(WAYS)[:: 1 if turn % 2 else -1]:
            secs = copies.sample(*WAYS[name])
            if turn:  # the first is not counted
                found[name].append(round(secs * 1e6, 1))
    document: dict[str, Any] = made_by() | {"us": found}
    write(options.out / "copy_queue.json", document)
    rows = [(n, f"{statistics.median(us):.0f}", f"{max(us):.0f}") for n, us in found.items()]
    text = table((f"a copy of {SMALL_BYTES >> 10} KiB", "us, median", "the longest"), rows) + "\n"
    (options.out / "copy_queue.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
