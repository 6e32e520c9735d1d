"""The GPU of these tests, or why they are skipped, and what reaches the log of each.

What is known of a test is there before anything else can end the process. After a fault of CUDA the
next object that gives back memory may abort, as one that is collected while pytest writes its
report: then nobody would know what failed.
"""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

import pytest

from tunerd.slices import plan
from tunerd.slices.base import Plan, Usability
from tunerd.slices.mps.mps_slice import MpsSlice
from tunerd.slices.whole import WholeSlice
from tunerd.system import host
from tunerd.system.gpus import GpuFacts
from tunerd.vocabulary import SliceRequest


@pytest.fixture(scope="session")
def needs_gpu() -> None:
    """Skip where no GPU can be used."""
    _skip_unless(WholeSlice.usability())


@pytest.fixture(scope="session")
def whole_gpu(needs_gpu: None) -> Plan:
    """GPUs as they are planned whole: slices, and the target to compile for."""
    return plan(SliceRequest("whole", 100))


@pytest.fixture(scope="session")
def mps_gpu() -> GpuFacts:
    """The first GPU; skip where none can be cut by MPS."""
    _skip_unless(MpsSlice.usability())
    return host.facts().gpus[0]


def _skip_unless(usable: Usability) -> None:
    if not usable.ok:
        pytest.skip(usable.why)


def _say(config: pytest.Config, text: str) -> None:
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{text}", file=sys.stderr, flush=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _say(item.config, item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is None or call.excinfo.errisinstance(pytest.skip.Exception):
        return
    gc.disable()
    try:
        text = "".join(traceback.format_exception(call.excinfo.value))
        _say(item.config, f"{item.nodeid} fails in its {call.when}:\n{text}")
    finally:
        gc.enable()
