"""A journal: a file of lines that only grows, each of them whole or not there."""

from __future__ import annotations

import os
from contextlib import suppress
from io import FileIO
from pathlib import Path


class Journal:
    """Lines of JSON, one for each thing that has ended. One process at a time may append."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, line: str) -> None:
        """Add a line; it is on the disk when this returns.

        Half a line that is there, of a kill or a full disk, makes way. Where this one cannot be
        written the file is as it was, or ends in half a line, and OSError is raised.
        """
        # Without a buffer: one would write what is left over when the file is closed.
        with self.path.open("a+b", buffering=0) as file:
            size_bytes = _cut(file)
            try:
                left = line.encode() + b"\n"
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                with suppress(OSError):
                    file.truncate(size_bytes)
                raise

    def read(self) -> bytes:
        """Return the whole lines, and nothing where there is no file."""
        try:
            return _whole(self.path.read_bytes())
        except FileNotFoundError:
            return b""


def _cut(file: FileIO) -> int:
    """Cut off half a line at the end, and return the size of what is left, in bytes."""
    size_bytes = file.seek(0, os.SEEK_END)
    if os.pread(file.fileno(), 1, max(0, size_bytes - 1)) in (b"", b"\n"):
        return size_bytes
    file.seek(0)
    return file.truncate(len(_whole(file.readall())))


def _whole(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]
