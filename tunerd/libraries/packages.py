"""Where a library is, of which version, and what to install where it is missing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tunerd.system.host import install_command
from tunerd.vocabulary import CUBLASLT, CUDNN


@dataclass(frozen=True)
class Package:
    """A library and the wheel that brings it. Versions are 10,000, 100 and 1 times their parts."""

    name: str  # of its source of candidates, and in `--libraries`
    title: str
    wheel: str
    soname: str
    version_function: str
    least: int
    needs: tuple[str, ...] = ()  # names of libraries that it finds only where they are loaded


PACKAGES = {
    each.name: each
    for each in (
        Package(
            CUBLASLT,
            "cuBLASLt",
            "nvidia-cublas",
            "libcublasLt.so.13",
            "cublasLtGetVersion",
            130000,
        ),
        Package(
            CUDNN,
            "cuDNN",
            "nvidia-cudnn-cu13",
            "libcudnn.so.9",
            "cudnnGetVersion",
            91200,  # the first for CUDA 13
            needs=(CUBLASLT,),  # it ends the process where it does not find it
        ),
    )
}


class LibraryCallError(RuntimeError):
    """A library refused a call."""


class MissingLibraryError(RuntimeError):
    """A library that is not there, or is too old; the message says what to install."""


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """Load a library into this process, or raise MissingLibraryError."""
    package = PACKAGES[name]
    for needed in package.needs:
        try:
            load(needed)
        except MissingLibraryError as error:
            raise MissingLibraryError(_without(package, str(error))) from None
    for path in _places(package):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(path)
            break
    else:
        raise MissingLibraryError(missing_text(package, f"{package.soname} is not found here"))
    version = _version_of(found, package)
    if version < package.least:
        raise MissingLibraryError(
            missing_text(package, f"{package.title} {version_text(version)} is here")
        )
    return found


def version(name: str) -> int:
    """Return the version that a library says of itself; raises MissingLibraryError."""
    return _version_of(load(name), PACKAGES[name])


def version_text(version: int) -> str:
    """Return a version as people write it.

    >>> version_text(131000)
    '13.10.0'
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def missing(name: str) -> str | None:
    """Say what to install to have a library, None where it is there. A wheel's is not loaded."""
    package = PACKAGES[name]
    if lacking := next(filter(None, map(missing, package.needs)), None):
        return _without(package, lacking)
    if _is_in_wheel(package):
        return None
    try:
        load(name)
    except MissingLibraryError as error:
        return str(error)
    return None


def wheel_version(name: str) -> str:
    """Return the version of the wheel that brings a library, "" where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(PACKAGES[name].wheel)
    return ""


def missing_text(package: Package, found: str) -> str:
    """Say that a library is needed, what was found, and what to do."""
    return (
        f"{package.title} {version_text(package.least)} or newer is needed, and {found}: "
        f"pip install {package.wheel}, or {install_command('libraries')}"
    )


def _without(package: Package, lacking: str) -> str:
    """Say what to install where what a library needs is lacking."""
    if _is_in_wheel(package):
        return f"{package.title} is here, and needs another library: {lacking}"
    return missing_text(package, f"{package.soname} is not found here, nor is what it needs")


def _is_in_wheel(package: Package) -> bool:
    return bool(wheel_version(package.name)) and any(map(Path.is_file, _in_wheels(package)))


def _version_of(library: ctypes.CDLL, package: Package) -> int:
    tell = getattr(library, package.version_function)
    tell.restype = ctypes.c_size_t
    return int(tell())


def _places(package: Package) -> Iterator[str]:
    """Yield what to load: one that this process or the system has, before those of wheels."""
    yield package.soname
    yield from map(str, _in_wheels(package))


def _in_wheels(package: Package) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace of many wheels
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(root).glob(f"*/lib/{package.soname}"))
