"""The cores and the memory that this process may use: affinity, cgroups, caches."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path


def core_quota(cgroup_root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores' worth of time the cgroups of this process allow; None: no limit."""
    limits = []
    for folder in _cgroup_folders(cgroup_root, "cpu"):
        try:
            if (folder / "cpu.max").exists():  # v2: "max 100000" or "150000 100000"
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def own_cgroups() -> list[str]:
    """Return the lines of /proc/self/cgroup: `id:controllers:path`, see cgroups(7)."""
    try:
        return Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []


def _cgroup_folders(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup in v1 and v2, up to the root: each may set a limit."""
    folders: list[Path] = []
    for line in own_cgroups():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        inner = base / path.lstrip("/")
        folders += [inner, *(p for p in inner.parents if p == base or base in p.parents)]
    return folders


def memory_bytes() -> int:
    """Return the memory of this machine, or what the cgroups of this process allow of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders(Path("/sys/fs/cgroup"), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                text = (folder / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():  # v2 writes "max" for no limit
                total = min(total, int(text))
    return total


def siblings(cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    groups = set()
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            members = _core_list(path.read_text())
        except (OSError, ValueError):
            members = {core}
        groups.add(tuple(sorted((members | {core}) & set(cores))))
    return tuple(sorted(groups))


def _core_list(text: str) -> set[int]:
    """Return the cores that the kernel's list format names: `0-2,8`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def cpu_field(name: str, path: Path = Path("/proc/cpuinfo")) -> str:
    """Return a field of the first core, "" where it has none; of those that do not change."""
    return _cpu_fields(path).get(name, "")


@functools.cache  # every load of an artifact asks, and the file has lines for each core
def _cpu_fields(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))  # the first of a name is kept
    return {name.strip(): value.strip() for name, _, value in pairs}


def last_level_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the size of the largest cache that a core of this machine uses; 0 where none tells."""
    sizes = [0]
    for path in folder.glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(path.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)
