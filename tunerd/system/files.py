"""Files written in one step, and disks that are full or fail, which nobody is to blame for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tunerd.errors import DiskError

# What an OSError says where a disk is full or fails.
ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
_ROOM_BYTES = 16 << 20  # of a build and its library many times over


@contextmanager
def disk_errors_said(folder: Path) -> Iterator[None]:
    """Raise DiskError instead of an OSError that says that a disk is full or fails."""
    try:
        yield
    except OSError as error:
        if error.errno not in ERRNOS:
            raise
        said = disk_error(folder, error)
        for note in getattr(error, "__notes__", ()):
            said.add_note(note)
        raise said from error


def disk_error(folder: Path, error: OSError) -> DiskError:
    return DiskError(
        f"{error.filename or folder} cannot be written: {error.strerror}; make room or mend the "
        "disk, then run the same command: it goes on with what was stored"
    )


def write_whole(
    path: Path, content: bytes | str, *, mode: int = 0o666, sync: bool = True, shared: bool = False
) -> None:
    """Write a file in one step; see `written_whole`."""
    with written_whole(path, mode=mode, sync=sync, shared=shared) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def written_whole(
    path: Path, *, mode: int = 0o666, sync: bool = True, shared: bool = False
) -> Iterator[BinaryIO]:
    """Yield what becomes a file in one step; where the block or it fails the old one is there.

    Args:
        mode: of the file, less the umask.
        sync: have it on the disk at the end, for what must be there after a power cut.
        shared: whether other processes may write the same file at the same time.
    """
    beside = path.with_name(f".{path.name}{f'.{os.getpid()}' if shared else ''}.part")
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(OSError):  # what failed is said
            beside.unlink(missing_ok=True)


def require_room(folder: Path) -> None:
    """Raise DiskError where a folder has no room for the files of a build.

    Looked at before, because LLVM ends the process where it cannot write.
    """
    found = os.statvfs(folder)
    if found.f_bavail * found.f_frsize < _ROOM_BYTES:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise disk_error(folder, full)
