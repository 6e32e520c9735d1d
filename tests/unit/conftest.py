"""A test of a unit starts no process: it would not be a fast one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_ASKED = {"git", "uname", "/sbin/ldconfig"}  # what a machine and a checkout are

_is_unit = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_unit and event in _STARTS and not _ASKED.issuperset(arguments[:1]):
        raise AssertionError("a unit test starts a process; move it to tests/system")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    global _is_unit
    _is_unit = True
    try:
        return (yield)
    finally:
        _is_unit = False
