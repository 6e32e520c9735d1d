"""The lab's script of many tenants on one device, with a small model on cores."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lab.colocation import resident
from lab.lab import load
from tests.lib.super_models import CONVNET, super_artifact, tenant


@pytest.mark.filterwarnings("ignore::tunerd.MismatchWarning")
def test_tenants_come_and_go_and_answer_each_in_its_own_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = super_artifact(tenant(CONVNET, 0, tmp_path), tmp_path / "super", (2,))
    given = [str(artifact), "--tenants", "6", "--resident", "3", "--secs", "0.1"]
    resident.main([*given, "--out", str(tmp_path / "out")])
    found = load(tmp_path / "out" / "resident.json")
    assert found["is_right"]
    assert found["together"] == 2
    parts = {way: each["found"] for way, each in found["ways"].items()}
    assert parts["few"] == parts["all"] == 1.0
    assert 0 < parts["cold"] < parts["skewed"] < 1
    assert len(found["cold_secs"]) >= 3
    assert "each answers as before, and as no other: yes" in capsys.readouterr().out


def test_answers_of_others_or_other_answers_are_found() -> None:
    one, other = np.zeros(2), np.ones(2)
    assert resident.agree([one, other], [one, other])
    assert not resident.agree([one, other], [other, one])
    assert not resident.agree([one, one], [one, one])


def test_skewed_requests_ask_the_first_most() -> None:
    counts = Counter(itertools.islice(resident.chosen("abcd", True, 0), 4000))
    assert counts["a"] > counts["b"] > counts["c"] > counts["d"] > 0
