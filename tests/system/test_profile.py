"""`tunerd profile`: visits to real and simulated slices, what a folder keeps, what people see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.lib import ROOT
from tests.lib.full_disk import full_beyond
from tests.lib.models import conv_net
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import DiskError, ExitCode, FolderError, Interrupted
from tunerd.runner.load import Load
from tunerd.slices.simulated import SimulatedRunner
from tunerd.studies.profile.curve import Visit
from tunerd.studies.profile.folder import REPORT, RESULT, SAMPLES, ProfileFolder
from tunerd.studies.profile.measuring import Effort
from tunerd.studies.profile.plan import order_of, plan_shares
from tunerd.studies.profile.profile import Profile, at_share, profile
from tunerd.studies.profile.subject import subject_of_artifact, subject_of_model
from tunerd.system import host
from tunerd.vocabulary import Failure

Captured = pytest.CaptureFixture[str]
QUICK = Effort(rounds=2, duration_secs=0.05)
SHARES = (20, 40, 100)


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "net.onnx"
    path.parent.mkdir()
    onnx.save(conv_net(), path)
    return path


@pytest.fixture
def knee_at_40(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make simulated slices of less than 40% slower, in proportion."""
    as_it_was = SimulatedRunner.load

    def load(self: SimulatedRunner, load: Load) -> float | Failure:
        secs = as_it_was(self, load)
        assert isinstance(secs, float)
        self._repeat_secs = secs * max(1.0, 40 / self.spec.pct)
        return self._repeat_secs

    monkeypatch.setattr(SimulatedRunner, "load", load)


def simulated(
    net: Path, root: Path, say: Callable[[str], None] = lambda what: None, rounds: int = 2
) -> Profile:
    subject = subject_of_model(net, (1, 4))
    shares = plan_shares("simulated", SHARES)
    return profile(subject, shares, root, effort=Effort(rounds, 0.05), say=say, slo_secs=8e-3)


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / SAMPLES).read_text().splitlines()]


# --- measuring ---------------------------------------------------------------------------------


def test_a_precision_is_that_of_the_kernels_and_of_the_profile(net: Path) -> None:
    exported, narrow = (subject_of_model(net, precision=p) for p in ("", "bf16"))
    assert [model.precision for _, model in narrow.models] == ["bf16"]
    assert exported.digest != narrow.digest


@pytest.mark.usefixtures("knee_at_40")
def test_a_profile_has_a_curve_and_a_knee_for_each_batch(net: Path, tmp_path: Path) -> None:
    found = simulated(net, tmp_path / "profile")
    assert [curve.batch for curve in found.curves] == [1, 4]
    for curve, knee, for_slo in zip(found.curves, found.knees, found.for_slo, strict=True):
        assert [p.sm_count for p in curve.points] == list(SHARES)
        assert knee.safe is at_share(curve, 40)
        assert for_slo.safe is at_share(curve, 40)  # five tasks of 1 ms, and 10 ms at 20%
        assert curve.full.slowdown.value == 1


def test_what_the_folder_holds_is_not_measured_again(net: Path, tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir(mode=0o755)
    first = simulated(net, tmp_path / "profile")
    before = lines(tmp_path / "profile")
    said: list[str] = []
    assert simulated(net, tmp_path / "profile", said.append) == first
    assert (lines(tmp_path / "profile"), said) == (before, [])
    assert (tmp_path / "profile").stat().st_mode & 0o077 == 0
    simulated(net, tmp_path / "profile", rounds=3)
    added = lines(tmp_path / "profile")[len(before) :]
    assert [entry["visit"]["round"] for entry in added] == [3] * 6


def test_a_profile_that_is_stopped_goes_on_with_the_visits_it_lacks(
    net: Path, tmp_path: Path
) -> None:
    def stop(message: str) -> None:
        if message.startswith("round 2"):
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        simulated(net, tmp_path / "profile", stop)
    kept = lines(tmp_path / "profile")
    found = simulated(net, tmp_path / "profile")
    assert lines(tmp_path / "profile")[: len(kept)] == kept
    visited = [
        (v["round"], v["pct"], v["batch"])
        for entry in lines(tmp_path / "profile")
        if (v := entry.get("visit"))
    ]
    assert len(visited) == len(set(visited)) == 2 * len(SHARES) * 2
    assert all(p.rounds == 2 for curve in found.curves for p in curve.points)


def test_half_a_line_of_a_killed_process_is_dropped(net: Path, tmp_path: Path) -> None:
    first = simulated(net, tmp_path / "profile")
    path = tmp_path / "profile" / SAMPLES
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    assert simulated(net, tmp_path / "profile").curves[0].batch == first.curves[0].batch
    assert len(path.read_bytes().splitlines()) == len(whole.splitlines())


def test_a_visit_that_finds_no_room_is_none_and_the_next_is_kept(tmp_path: Path) -> None:
    first, second, third = (Visit(n, 50, 50, 1, (0.1,) * 9, 0.9) for n in (1, 2, 3))
    root = tmp_path / "profile"

    def work() -> None:
        with ProfileFolder.opened(root, {}) as folder:
            folder.add(first, None)
            size_bytes = (root / SAMPLES).stat().st_size
            try:
                with full_beyond(size_bytes + 20):
                    folder.add(second, None)
            finally:
                folder.add(third, None)
                assert folder.visits == [first, third]

    with pytest.raises(DiskError, match="File too large; make room"):
        work()
    with ProfileFolder.opened(root, {}) as folder:
        assert folder.visits == [first, third]


def test_a_line_that_was_changed_is_refused_with_its_number(tmp_path: Path) -> None:
    root = tmp_path / "profile"
    with ProfileFolder.opened(root, {}) as folder:
        folder.add(Visit(1, 50, 50, 1, (0.1,) * 9, 0.9), None)
    whole = (root / SAMPLES).read_bytes()
    (root / SAMPLES).write_bytes(whole[:30] + b"\n" + whole)
    with (
        pytest.raises(FolderError, match=r"line 1 of .* is no sample"),
        ProfileFolder.opened(root, {}),
    ):
        pass


@pytest.mark.parametrize("name", ["file", "file/p", "p" * 300])
def test_a_folder_of_a_profile_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(FolderError, match=r"cannot be written|is a file, and no folder"),
        ProfileFolder.opened(tmp_path / name, {}),
    ):
        pass


def test_each_round_has_an_order_of_its_own_that_a_seed_repeats() -> None:
    pcts = tuple(range(10, 101, 10))
    orders = {order_of(number, pcts, seed=0) for number in range(1, 6)}
    assert len(orders) == 5
    assert all(sorted(order) == list(pcts) for order in orders)
    assert order_of(1, pcts, seed=0) == order_of(1, tuple(reversed(pcts)), seed=0)
    assert order_of(1, pcts, seed=0) != order_of(1, pcts, seed=1)


def test_shares_of_this_machines_cores_are_proved_and_measured_once_each(
    net: Path, tmp_path: Path
) -> None:
    cores = host.facts().usable_cores
    if cores < 2:
        pytest.skip("one core has no shares")
    one_core = -(-100 // cores)
    wanted = (1, one_core, one_core + 1, 100)
    shares = plan_shares("cpu", wanted)
    subject = subject_of_model(net, (2,))
    # Real cores, which others may have for a while.
    found = profile(subject, shares, tmp_path / "p", effort=Effort(2, 0.5), say=lambda what: None)
    (curve,) = found.curves
    assert curve.points[0].pcts[0] == one_core
    assert curve.full.sm_count == cores
    assert {pct: proof.sm_count for pct, proof in found.proofs} == {
        pct: cores * pct // 100 for pct in wanted[1:]
    }
    assert found.left_out[0][0] == 1 or cores >= 100
    visits = [v for entry in lines(tmp_path / "p") if (v := entry.get("visit"))]
    assert len(visits) == 2 * len(curve.points)
    assert all(v["run_secs"] for v in visits)


def test_an_artifact_is_profiled_as_it_is(artifact_of: Callable[[], Path], tmp_path: Path) -> None:
    subject = subject_of_artifact(artifact_of())
    assert subject.schedules == "tuned at 50%"
    shares = plan_shares("cpu", (100,))
    found = profile(subject, shares, tmp_path / "p", effort=QUICK, say=lambda what: None)
    assert found.curves[0].batch == 2
    assert not (tmp_path / "p" / "artifacts").exists()


# --- the command -------------------------------------------------------------------------------


@pytest.mark.usefixtures("knee_at_40")
def test_the_command_leaves_a_page_and_a_document(
    net: Path, tmp_path: Path, capsys: Captured
) -> None:
    root = tmp_path / "profile"
    argv = ["profile", str(net), "--slice", "simulated", "--shares", "20,40", "--batches", "1,4"]
    argv += ["--rounds", "2", "--duration", "0.05s", "--slo-ms", "8", "--out", str(root)]
    assert run(app, [*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [b["knee"]["pct"] for b in document["batches"]] == [40, 40]
    assert [b["slo"]["pct"] for b in document["batches"]] == [40, 40]
    assert json.loads((root / RESULT).read_text()) == {
        key: value for key, value in document.items() if key != "report"
    }
    page = (root / REPORT).read_text()
    assert page.count("the knee is 40% (40 SMs)") == 2
    assert page.count("<svg") > 2
    assert "<script src" not in page
    assert run(app, argv) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the knee is 40% (40 SMs), the smallest share within 10% of the whole" in shown
    assert run(app, [*argv, "--format", "markdown"]) == 0
    assert "| 1 | 40% | 40 |" in capsys.readouterr().out


def refused(capsys: Captured, code: ExitCode, *argv: object) -> str:
    assert run(app, ["profile", *map(str, argv)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_profile_that_is_stopped_leaves_the_report_of_its_whole_rounds(
    net: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, flags = tmp_path / "profile", ("--slice", "simulated", "--duration", "0.05s", "--shares")
    argv = ["profile", str(net), *flags, "40,100", "--out", str(root), "--rounds", "9"]
    made, visit = [], SimulatedRunner.load

    def load(self: SimulatedRunner, load: Load) -> float | Failure:
        made.append(self)
        if len(made) in (2, 6):  # in rounds 1 and 3 of two visits each
            os.kill(os.getpid(), signal.SIGTERM)
        return visit(self, load)

    monkeypatch.setattr(SimulatedRunner, "load", load)
    assert run(app, argv) == ExitCode.INTERRUPTED
    capsys.readouterr()
    assert run(app, argv) == ExitCode.INTERRUPTED
    found = json.loads((root / RESULT).read_bytes())["rounds"]
    assert 1 <= found < 9
    assert f"{found} of 9 rounds are in {root / REPORT}" in capsys.readouterr().err
    picture = tmp_path / "p.svg"
    script = ROOT / "scripts" / "lab" / "shares" / "plot_profiles.py"
    command = [sys.executable, script, tmp_path, "--shares", "40", "--out", picture]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert f"| profile | 1 | {found} | " in done.stdout
    assert "batch 1 at 40%" in picture.read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--shares", "0,100"), "--shares '0,100' is no list of whole numbers from 1 to 100"),
        (("--shares", ""), "write for example --shares 10,25,50,100"),
        (("--shares", "half"), "--shares 'half'"),
        (("--batches", "1,,8"), "--batches '1,,8'"),
        (("--loss", "0%"), "--loss '0%' is no percentage above 0"),
        (("--loss", "-5%"), "--loss"),
        (("--duration", "0s"), "--duration 0s of a visit must be"),
        (("--duration", "49ms"), "--duration 49ms of a visit must be 0.05s to 10m"),
        (("--duration", "soon"), "'soon' is not a duration"),
        (("--gpu", "--cpu"), "--gpu and --cpu ask for two devices"),
        (("--cpu", "--slice", "mps"), "--slice mps is of the other device"),
        (("--json", "--format", "markdown"), "leave one of them out"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(
    flags: tuple[str, ...], said: str, net: Path, capsys: Captured
) -> None:
    if "--json" in flags:
        assert run(app, ["profile", str(net), *flags]) == ExitCode.BAD_INPUT
        assert said in capsys.readouterr().err
        return
    assert said in refused(capsys, ExitCode.BAD_INPUT, net, *flags)


def test_a_folder_of_another_model_is_refused(net: Path, tmp_path: Path, capsys: Captured) -> None:
    flags = ("--slice", "simulated", "--rounds", 1, "--duration", "0.05s", "--shares", "100")
    root = tmp_path / "profile"
    assert run(app, ["profile", str(net), *map(str, flags), "--out", str(root), "--json"]) == 0
    capsys.readouterr()
    onnx.save(conv_net(channels=4), net)
    line = refused(capsys, ExitCode.BAD_FOLDER, net, *flags, "--out", root, "--format", "json")
    assert "holds a profile with another subject" in line


def test_a_folder_of_something_else_is_refused(net: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    flags = ("--slice", "simulated", "--format", "json", "--out", tmp_path / "mine")
    assert "holds 'thesis.tex'" in refused(capsys, ExitCode.BAD_FOLDER, net, *flags)


def test_an_artifact_has_no_other_batch(artifact_of: Callable[[], Path], capsys: Captured) -> None:
    line = refused(capsys, ExitCode.BAD_INPUT, artifact_of(), "--batches", "1,2")
    assert "compiled for batch 2 and has no other" in line


def test_an_artifact_that_was_changed_is_refused(
    artifact_of: Callable[[], Path], tmp_path: Path, capsys: Captured
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact_of(), copy)
    with (copy / "model.so").open("ab") as library:
        library.write(b"more")
    assert "was changed" in refused(capsys, ExitCode.BAD_INPUT, copy)


def test_a_model_that_is_missing_is_refused(tmp_path: Path, capsys: Captured) -> None:
    refused(capsys, ExitCode.BAD_MODEL, tmp_path / "nowhere.onnx", "--cpu", "--batches", "1,8")
