"""A test of a unit starts no process: it would not be a fast one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_ASKED = {"git", "lscpu", "uname", "/sbin/ldconfig"}  # what a machine and a checkout are

_UNIT = Path(__file__).parent
_is_unit = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_unit and event in _STARTS and not _ASKED.issuperset(arguments[:1]):
        raise AssertionError("a unit test starts a process; move it to tests/system")


sys.addaudithook(_refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _is_unit
    _is_unit = item.path.is_relative_to(_UNIT)
    try:
        return (yield)
    finally:
        _is_unit = False
