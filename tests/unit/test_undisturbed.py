"""What an engine changes for the whole process is as it was when the last one has ended."""

from __future__ import annotations

import gc
import sys

import pytest

from tunerd.colocation import undisturbed


def test_what_is_there_is_exempt_from_collections_until_the_last_engine_ends() -> None:
    gc.unfreeze()
    usual = sys.getswitchinterval()
    undisturbed.begin()
    undisturbed.begin()
    undisturbed.end()
    assert sys.getswitchinterval() < usual
    assert gc.get_freeze_count() > 0
    undisturbed.end()
    assert sys.getswitchinterval() == usual
    assert gc.get_freeze_count() == 0


def test_no_garbage_is_made_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a closed engine held of a device is given back before another one begins."""
    found: list[int] = []
    monkeypatch.setattr(undisturbed, "_collect", lambda: found.append(gc.get_freeze_count()))
    gc.unfreeze()
    undisturbed.begin()
    undisturbed.end()
    assert found == [0]
