"""A run folder as one file, to keep it or to go on with it on another host."""

from __future__ import annotations

import gzip
import shutil
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from tunerd.errors import FolderError
from tunerd.records.paths import Paths
from tunerd.records.schema import STORE_NAME
from tunerd.records.sqlite import check_integrity, copy_snapshot
from tunerd.system.text import reason_of

MAX_BYTES = 64 << 30
MAX_MEMBERS = 200_000
# tarfile reads extended headers whole; none that pack() writes is larger than a path.
_MAX_READ_BYTES = 1 << 20
_COPY_BYTES = 1 << 20


def pack(folder: Path, file: Path) -> Path:
    """Write a run folder into one .tar.gz and return its path.

    The store is copied as it is at this moment, so that a run may be alive. Raises FolderError
    where there is no run, or the file exists or cannot be written.
    """
    paths = Paths(folder)
    require_new(file)
    with written_beside(file, folder) as beside:
        snapshot = beside / STORE_NAME
        copy_snapshot(paths.store, snapshot)
        check_integrity(snapshot)
        whole = beside / "whole"
        with tarfile.open(whole, "x:gz", compresslevel=6, format=tarfile.PAX_FORMAT) as archive:
            archive.add(snapshot, STORE_NAME, filter=_without_owner)
            for path in _members(paths):
                name = path.relative_to(folder).as_posix()
                archive.add(path, name, recursive=False, filter=_without_owner)
        whole.replace(file)
    return file


def unpack(
    file: Path, folder: Path, *, max_bytes: int = MAX_BYTES, max_members: int = MAX_MEMBERS
) -> Path:
    """Extract what `pack` wrote into a new folder and return it.

    Nothing of the archive is trusted: it may hold plain files and folders of a run and nothing
    else, within the limits. All of it is extracted and checked, or the folder is not created.
    """
    require_new(folder)
    with written_beside(folder, file) as beside:
        whole = beside / "whole"
        whole.mkdir(mode=0o700)
        try:
            with open(file, "rb") as packed, gzip.open(_gzipped(packed)) as stream:
                _extract(stream, whole, file=file, max_bytes=max_bytes, max_members=max_members)
        except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
            reason = reason_of(error)
            raise FolderError(
                f"{file} cannot be unpacked: {reason}; give a file that `tunerd records pack` wrote"
            ) from error
        if not (whole / STORE_NAME).is_file():
            raise FolderError(f"{file} holds no run of tunerd: it has no {STORE_NAME}")
        check_integrity(whole / STORE_NAME)
        whole.replace(folder)  # also where it exists and is empty
    return folder


def _gzipped(packed: BinaryIO) -> BinaryIO:
    magic = packed.read(2)
    packed.seek(0)
    if magic != b"\x1f\x8b":  # RFC 1952, section 2.3.1
        raise ValueError("it is no .tar.gz")
    return packed


def _members(paths: Paths) -> Iterator[Path]:
    yield from (p for p in (paths.settings, paths.host, paths.report) if p.is_file())
    for tree in (paths.artifact, paths.logs):
        if tree.is_dir():
            yield tree
            for path in sorted(tree.rglob("*")):
                kind = path.lstat().st_mode
                if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
                    yield path
    # The choice of a share and what it was made by. Other profiles are of this host alone.
    for path in sorted((*paths.shares.glob("*.json"), *paths.shares.glob("default/*"))):
        if stat.S_ISREG(path.lstat().st_mode):
            yield path


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o700 if member.isdir() else 0o600
    return member


class _Bounded:
    """A stream that refuses to hand out large pieces at once."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile) -> None:
        self._stream = stream
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes is over {_MAX_READ_BYTES}")
        return self._stream.read(size)


def _extract(
    stream: BinaryIO | gzip.GzipFile, to: Path, *, file: Path, max_bytes: int, max_members: int
) -> None:
    left = max_bytes
    with tarfile.open(fileobj=_Bounded(stream), mode="r:") as archive:  # type: ignore[call-overload]
        for count, member in enumerate(archive, start=1):
            left -= member.size
            if count > max_members or left < 0:
                raise FolderError(
                    f"{file} holds more than {max_members} files or {max_bytes} bytes, the limits "
                    "of a packed run; nothing was unpacked"
                )
            target = to / _checked_name(member, file)
            if member.type == tarfile.DIRTYPE:
                target.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None  # _checked_name let plain files through only
            with content, open(target, "xb") as copy:
                target.chmod(0o600)
                shutil.copyfileobj(content, copy, _COPY_BYTES)


def _checked_name(member: tarfile.TarInfo, file: Path) -> PurePosixPath:
    name = PurePosixPath(member.name)
    known = Paths(Path())
    plain = {p.name for p in (known.settings, known.host, known.store, known.report)}
    trees = {known.artifact.name, known.logs.name, known.shares.name}
    is_folder = member.type == tarfile.DIRTYPE
    is_file = member.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    in_tree = bool(name.parts) and name.parts[0] in trees and (is_folder or len(name.parts) > 1)
    at_top = len(name.parts) == 1 and name.name in plain and is_file
    ok = (is_folder or is_file) and (in_tree or at_top) and ".." not in name.parts
    if not ok or "\0" in member.name or len(member.name) > 1000:
        raise FolderError(
            f"{file} holds '{member.name[:100]}', which is no plain file of a run; nothing was "
            "unpacked: give a file that `tunerd records pack` wrote"
        )
    return name


def require_new(target: Path) -> None:
    """Raise FolderError where `target` exists and is no empty folder, or cannot be looked at."""
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise FolderError(f"{target} cannot be used: {reason}; choose another place") from error
    if taken or not target.name:
        raise FolderError(f"{target} exists; nothing was written: choose a new place")


@contextmanager
def written_beside(target: Path, source: Path) -> Iterator[Path]:
    """Yield a private folder beside `target`, on its file system, removed at the end."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        raise FolderError(
            f"{source} cannot be written to {target}: {reason_of(error)}; choose another place"
        ) from error
