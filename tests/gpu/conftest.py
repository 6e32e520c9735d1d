"""What is known of a test reaches the log before anything else can end the process.

After a fault of CUDA the next object that gives back memory may abort, as one that is collected
while pytest writes its report: then nobody would know what failed.
"""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

import pytest


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
