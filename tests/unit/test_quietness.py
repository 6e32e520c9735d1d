"""When a run says that others disturb a device, and that they are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib.report_runs import run_facts
from tunerd.records.paths import Paths
from tunerd.settings import TuneSettings
from tunerd.telemetry.events import Telemetry
from tunerd.telemetry.progress import QuietProgress
from tunerd.telemetry.quietness import QUIET_RESULTS, Quietness
from tunerd.vocabulary import Conditions, Failure, Kind, Measurement, Stage


def result(disturbed_by: str = "") -> Measurement:
    return Measurement((1e-3,), 1, "p", "mps-0-0", 52, Conditions(disturbed_by=disturbed_by))


def test_a_device_that_becomes_disturbed_is_said_once_and_so_is_its_quiet() -> None:
    quietness = Quietness()
    assert quietness.note("GPU-1", [result()]) == []
    assert quietness.note("GPU-1", [result("pid 7"), result("pid 8")]) == [
        "GPU-1: pid 7; what is measured now is marked, and its best are measured again when the "
        "device is quiet"
    ]
    assert quietness.note("GPU-1", [result()] * (QUIET_RESULTS - 1)) == []
    assert quietness.note("GPU-1", [result()]) == ["GPU-1 is quiet again"]
    assert quietness.note("GPU-1", [result()]) == []


def test_a_tenant_that_comes_and_goes_is_one() -> None:
    quietness, lost = Quietness(), Failure(Stage.RUN, Kind.TIMEOUT, "10 s")
    said = [quietness.note("GPU-1", [result("pid 7"), lost, result()]) for _ in range(50)]
    assert len([s for s in said if s]) == 1
    assert quietness.note("GPU-2", [result("pid 7")]) != []


class Shown(QuietProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)


def test_who_watches_and_the_log_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = TuneSettings(model=tmp_path, out=tmp_path, cpu_pct=50, slice_kind="cpu")
    shown = Shown()
    telemetry = Telemetry(shown, Paths(tmp_path), run_facts(), settings)
    telemetry.measured("GPU-1", [result("pid 7"), result("pid 7")])
    telemetry.measured("GPU-1", [result()] * QUIET_RESULTS)
    first, last = shown.warnings
    assert first.startswith("GPU-1: pid 7; what is measured now is marked")
    assert last == "GPU-1 is quiet again"
    assert [r.message for r in caplog.records] == shown.warnings
