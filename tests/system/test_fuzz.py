"""Readers of what comes from outside either work or refuse; scripts/dev/fuzz looks for more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.lib import DATA, ROOT
from tests.lib.fuzz_readers import READERS, seeds_folder

FOUND = sorted((DATA / "fuzz").glob("*.bin"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_broke_a_reader_once_is_refused_now(path: Path, tmp_path: Path) -> None:
    """The reader is the first word of the file's name."""
    reader = READERS[path.stem.partition("-")[0]]
    reader.inputs(seeds_folder(tmp_path))
    folder = tmp_path / "input"
    folder.mkdir()
    reader.read(path.read_bytes(), folder)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_works_or_refuses_in_one_sentence(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    reader = READERS[name]
    place = tmp_path_factory.mktemp("fuzz")

    @hypothesis.settings(
        max_examples=25,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(reader.inputs(seeds_folder(place)))
    def reads(content: bytes) -> None:
        folder = tmp_path_factory.mktemp("input")
        # The seeds' folder is looked for beside an input's.
        (folder / "seeds").symlink_to(place / "seeds")
        inner = folder / "input"
        inner.mkdir()
        reader.read(content, inner)

    reads()


def test_the_fuzzer_reports_and_keeps_what_breaks_a_reader(tmp_path: Path) -> None:
    """A reader that ends its process is one that nothing in that process can catch."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(f"""
import os, sys
if "--child" in sys.argv:
    sys.path.insert(0, {str(ROOT)!r})
    from tests.lib import fuzz_readers
    shapes = fuzz_readers.READERS["shapes"]
    broken = fuzz_readers.Reader(shapes.inputs, lambda content, folder: os.abort())
    fuzz_readers.READERS["shapes"] = broken
""")
    argv = ["--reader", "shapes", "--seconds", "2", "--keep", tmp_path]
    done = subprocess.run(
        [sys.executable, "scripts/dev/fuzz", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(broken)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "signal-6" in done.stdout
    kept = list(tmp_path.glob("shapes-signal-6-*.bin"))
    assert kept
    assert kept[0].read_bytes().startswith(b"{")
