"""What every test may rely on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_CORES = os.sched_getaffinity(0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Give this process its cores back: TVM binds the thread that a model runs in to one.

    Before fixtures of any scope are made: processes that they start inherit the cores.
    """
    os.sched_setaffinity(0, _CORES)
    return (yield)
