"""What a newcomer types, from a clean clone, on a terminal: scripts/dev/newcomer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lib import ROOT

pytestmark = pytest.mark.slow


def test_a_newcomer_tunes_a_model_from_a_clean_clone_stops_and_goes_on() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Other tests share the cores: only what hangs is a fault here.
    command = [sys.executable, ROOT / "scripts" / "dev" / "newcomer", "--silence", "280"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("a newcomer gets there\n")
