"""What a newcomer types, from a clean clone, on a terminal: scripts/dev/newcomer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.lib import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("tuning", id="stops a tuning run and goes on"),
        pytest.param("sharing", id="has two models share the cores", marks=pytest.mark.nightly),
    ],
)
def test_a_newcomer_gets_there_from_a_clean_clone(part: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    # Other tests share the cores: only what hangs is a fault here.
    script = ROOT / "scripts" / "dev" / "newcomer"
    command = [sys.executable, script, "--silence", "280", "--only", part]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("a newcomer gets there\n")
