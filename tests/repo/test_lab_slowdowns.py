"""How the lab's script of slowdowns takes pairs in turn, and what it says of the estimate."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lab.colocation import slowdowns
from lab.colocation.slowdowns import in_order
from tests.lib.artifact_fixtures import tiny_artifact
from tunerd.colocation.planning.pairs import PAIRS, Pair, Side, append, read_pairs
from tunerd.vocabulary.verdict import Interval


def test_each_two_models_are_measured_once_before_any_is_again() -> None:
    found = list(in_order("abc", [(50, 50), (25, 75)]))
    apart = [(one, two) for one, two, _ in found if one != two]
    assert sorted(apart[:3]) == sorted(apart[3:6]) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert len(found) == len(set(found)) == 3 * 3 + 3 * 2
    assert {split for one, two, split in found if one != two} == {(50, 50), (25, 75), (75, 25)}


def test_pairs_are_measured_once_and_too_few_teach_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_artifact(tmp_path / "artifact")
    given = [f"one={tmp_path / 'artifact'}", "--device", "cpu", "--splits", "50-50"]
    given += ["--rounds", "1", "--round-secs", "0.2", "--out", str(tmp_path / "out")]
    slowdowns.main(given)
    assert "no estimate: " in capsys.readouterr().out
    before = read_pairs(tmp_path / "out" / PAIRS)
    assert len(before) == 2
    slowdowns.main(given)
    assert read_pairs(tmp_path / "out" / PAIRS) == before


def test_what_was_measured_is_learned_from_and_the_calibration_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = "another machine's"
    sizes = {f"m{n}": 10.0 ** (6 + n / 3) for n in range(6)}

    def side(name: str, share: int) -> Side:
        return Side(name, name, share, {"weight_bytes": sizes[name]})

    append(
        tmp_path / PAIRS,
        [
            Pair(side(a, s), side(b, 100 - s), device, Interval(x, x, x), "a law")
            for a, b in itertools.permutations(sizes, 2)
            for s in (25, 50, 75)
            for x in [1 + 0.1 * (100 - s) / 100]
        ],
    )
    slowdowns.main(["--estimate-only", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "at most 5%: yes" in shown
    assert "| m0 at 75% | m1 at 25% | 1.025 |" in shown
    assert "<circle" in (tmp_path / "slowdowns.svg").read_text()
