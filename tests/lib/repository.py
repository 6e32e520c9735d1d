"""What lies in the repository, and what its documents link to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.lib import ROOT

PACKAGE = ROOT / "tunerd"
RESULTS = ROOT / "results"
LAB = ROOT / "scripts" / "lab"


def tracked() -> list[Path]:
    """Return the files under version control that are there."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def links_of(text: str) -> list[str]:
    return re.findall(r"\]\((?!https?://|#)([^)#]+)\)", text)
