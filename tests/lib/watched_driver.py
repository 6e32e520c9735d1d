"""A CUDA driver that does nothing but note by which function it was asked first."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>

static int asked(const char *name) {
    FILE *file = fopen(getenv("WATCHED_DRIVER"), "a");
    fprintf(file, "%s\n", name);
    fclose(file);
    return 100; /* CUDA_ERROR_NO_DEVICE */
}

int cuInit(unsigned flags) { return asked("cuInit"); }
int cuDriverGetVersion(int *version) { *version = 13000; return asked("cuDriverGetVersion"); }
int cuDeviceGetCount(int *count) { *count = 0; return asked("cuDeviceGetCount"); }
int cuGetProcAddress_v2(const char *name, void **at, int version, unsigned long flags, void *status)
{
    *at = NULL;
    return asked(name);
}
"""


class WatchedDriver:
    """Processes with this environment find it where they look for the driver."""

    def __init__(self, folder: Path) -> None:
        self._said = folder / "asked"
        source, library = folder / "driver.c", folder / "libcuda.so.1"
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        self.environment = {"LD_LIBRARY_PATH": str(folder), "WATCHED_DRIVER": str(self._said)}

    def asked(self) -> list[str]:
        """Return by which functions, in order."""
        return self._said.read_text().split() if self._said.exists() else []
