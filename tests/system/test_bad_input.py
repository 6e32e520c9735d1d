"""Flags and run folders that cannot be used are refused in one sentence, and nothing is written."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.lib.bad_input import Bad, Make, Place, check, net, of_dims, relu, tune
from tests.lib.record_samples import FACTS
from tunerd.errors import ExitCode
from tunerd.frontend.model import read_model
from tunerd.records import RunFacts, sqlite
from tunerd.records.schema import STORE_NAME
from tunerd.runs.folder import RunFolder
from tunerd.vocabulary import TargetSpec

# --- flags -------------------------------------------------------------------------------------


def flags(*given: object) -> Make:
    return lambda place: tune(place.saved(net(relu())), *given)


def open_flags(*given: object) -> Make:
    return lambda place: tune(place.saved(of_dims("n", 4)), *given)


NINES = "9" * 5000

FLAGS: dict[str, tuple[Make, str]] = {
    "a budget without a unit": (flags("--budget", "soon"), "'soon' is not a duration; write for"),
    "a negative budget": (flags("--budget", "-5m"), "-5m.* is not a duration; write for example"),
    "a budget in parsecs": (flags("--budget", "10 pc"), "'10 pc' is not a duration; write for ex"),
    "a budget of nothing": (flags("--budget", "0s"), "0s leaves no time; give more than 0s"),
    "no budget": (flags("--budget", ""), "'' is not a duration; write for example 90s"),
    "an endless budget": (flags("--budget", NINES), "longer than a year; write for example 90s"),
    "a budget in other digits": (flags("--budget", "\u0661m"), "is not a duration; write for ex"),
    "a shape without sizes": (flags("--shape", "x"), "'x' is not NAME:SIZES.*--shape images:1,3"),
    "a shape with a gap": (flags("--shape", "x:1,,4"), "'x:1,,4' is not NAME:SIZES"),
    "a shape with crosses": (flags("--shape", "x:1x4"), "'x:1x4' is not NAME:SIZES"),
    "a shape with a zero": (flags("--shape", "x:0,4"), "'x:0,4' is not NAME:SIZES.*1 or more"),
    "a shape of nothing": (flags("--shape", ":1,4"), "':1,4' is not NAME:SIZES"),
    "a shape over 32 bits": (flags("--shape", "x:9999999999,4"), "1 or more, up to 2147483647"),
    "a shape with an underscore": (flags("--shape", "x:1_0,4"), "'x:1_0,4' is not NAME:SIZES"),
    "a shape of another input": (
        open_flags("--shape", "q:1,4"),
        "no input 'q'; its inputs are 'x'",
    ),
    "a shape of another rank": (
        open_flags("--shape", "x:1,4,1"),
        "has 3 dimensions; the model's i",
    ),
    "a shape that contradicts": (open_flags("--shape", "x:1,5"), "differs from the model's own"),
    "two shapes of one input": (
        open_flags("--shape", "x:1,4", "--shape", "x:2,4"),
        "--shape is given twice for 'x', with other sizes; give it once",
    ),
    "a dimension without a size": (flags("--dim", "n"), "'n' is not NAME=SIZE.*--dim batch=1"),
    "a dimension of words": (flags("--dim", "n=many"), "'n=many' is not NAME=SIZE"),
    "a dimension of zero": (flags("--dim", "n=0"), "'n=0' is not NAME=SIZE with a size of 1"),
    "a dimension of nothing": (flags("--dim", "=1"), "'=1' is not NAME=SIZE"),
    "a dimension of 5,000 digits": (flags("--dim", f"n={NINES}"), "up to 2147483647; write for"),
    "a dimension that is closed": (
        flags("--dim", "n=1"),
        "dimension 'n': all their sizes.*give --batch",
    ),
    "a dimension of another name": (
        open_flags("--dim", "m=1"),
        "dimension 'm': the open ones are 'n'",
    ),
    "two sizes of a dimension": (
        open_flags("--dim", "n=1", "--dim", "n=2"),
        "--dim is given twice for 'n', with other sizes; give it once",
    ),
    "a shape and a dimension": (
        open_flags("--shape", "x:1,4", "--dim", "n=2"),
        "dimension 'n' is given as 2 and.*as 1; give one of them",
    ),
    "a batch and a dimension": (
        open_flags("--batch", 2, "--dim", "n=2"),
        "give either --batch or --dim n=..., not both",
    ),
    "a batch of zero": (flags("--batch", 0), "--batch '0' is no batch size of 1 or more"),
    "a batch over 32 bits": (flags("--batch", 10**12), "--batch '1000000000000' .* 2147483647"),
    "half a trial": (flags("--trials", 1.5), "'--trials': .*--help"),
    "trials over 32 bits": (flags("--trials", 10**12), "--trials 1000000000000 is more than 2147"),
    "no slices": (flags("--slices", 0), "'--slices': .*--help"),
    "no tuners": (flags("--tuners", 0), "'--tuners': .*--help"),
    "a negative seed": (flags("--seed", -1), "'--seed': .*--help"),
    "a seed over 32 bits": (
        flags("--seed", 10**12),
        "--seed 1000000000000 is more than 2147483647",
    ),
    "no trials": (flags("--trials", 0), "'--trials': 0 is less than 1; `tunerd tune --help`"),
    "a seed in words": (flags("--seed", "x"), "'--seed': 'x' is not a whole number; `tunerd"),
    "another precision": (flags("--precision", "fp8"), "'--precision': 'fp8' is not one of 'fp32'"),
    "a slice of another kind": (flags("--slice", "cloud"), "'cloud' is not one of 'mps', 'whole'"),
    "a GPU's slice of cores": (flags("--slice", "mps"), "--slice mps takes its share from --gpu-"),
    "a core's slice of a GPU": (
        lambda p: ["tune", "a.onnx", "--gpu-pct", 40, "--slice", "cpu"],
        "--slice cpu takes its share from --cpu-pct",
    ),
    "MPS on cores": (flags("--mps", "external"), "--mps external is for slices of kind mps.*leave"),
    "MPS of another kind": (flags("--mps", "none"), "'none' is not one of 'own', 'external'"),
    "an unknown flag": (flags("--color"), "No such option: --color; .*--help"),
    "two models": (flags("another.onnx"), r"unexpected extra argument.*another\.onnx"),
    "an address of a client": (flags("--address", "ray://a:1"), "'ray://a:1' is not HOST:PORT"),
    "no share": (lambda p: ["tune", "a.onnx"], "give one share: --gpu-pct for GPUs or --cpu-pct"),
    "two shares": (flags("--gpu-pct", 40), "give one share: --gpu-pct for GPUs or --cpu-pct"),
    **{
        f"{share!r} as {flag}": (
            lambda p, flag=flag, share=share: ["tune", "a.onnx", flag, share],  # type: ignore[misc]
            f"'{flag}': .* --help",
        )
        for flag in ("--gpu-pct", "--cpu-pct")
        for share in ("0", "101", "-1", "33.3", "40%", "", "half")
    },
}


@pytest.mark.parametrize("what", FLAGS)
def test_a_flag_that_cannot_be_used(
    what: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = FLAGS[what]
    check(Bad(what, make, ExitCode.BAD_INPUT, said), place, capsys)


# --- run folders -------------------------------------------------------------------------------


def tune_in(folder: object, model_path: str) -> list[object]:
    return ["tune", model_path, "--cpu-pct", 100, "--trials", 1, "--out", folder]


def other_run(**changes: Any) -> Make:
    """Tune a model in the folder of a run that differs in what `changes` say."""

    def make(place: Place) -> list[object]:
        path = place.saved(net(relu()))
        facts = {
            "model_name": "net",
            "model_digest": read_model(Path(path)).digest,
            "target": TargetSpec("llvm", "{}"),
            "device": "CPU",
            "slice_kind": "cpu",
            "pct": 100,
            "tvm_version": "0.27",
        }
        return tune_in(place.run(facts=RunFacts(**(facts | changes))), path)

    return make


def in_a_file(place: Place) -> list[object]:
    return tune_in(place.saved(b"mine", "file"), place.saved(net(relu())))


def with_a_thesis(place: Place) -> list[object]:
    (place.folder / "mine").mkdir()
    (place.folder / "mine" / "thesis.tex").write_text("mine")
    return tune_in(place.folder / "mine", place.saved(net(relu())))


def in_use(place: Place) -> list[object]:
    place.stack.enter_context(RunFolder.open(place.folder / "run", facts=FACTS))
    return tune_in(place.folder / "run", place.saved(net(relu())))


def locked(place: Place) -> list[object]:
    """Another program holds the write lock, longer than anybody waits."""
    argv = other_run()(place)
    patch = place.stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(sqlite, "BUSY_TIMEOUT_SECS", 0.05)
    raw = sqlite3.connect(place.folder / "run" / STORE_NAME, isolation_level=None)
    place.stack.callback(raw.close)
    raw.execute("BEGIN IMMEDIATE")
    return list(argv)


FOLDERS = [
    Bad("held", locked, ExitCode.BAD_FOLDER, "another program keeps .*locked.*end it"),
    Bad("a file", in_a_file, ExitCode.BAD_FOLDER, "file is a file, and no folder; choose a"),
    Bad(
        "below a file",
        lambda p: tune_in(p.saved(b"", "file") + "/run", p.saved(net(relu()))),
        ExitCode.BAD_FOLDER,
        "file is a file, and no folder; choose a folder of yours with --out",
    ),
    Bad(
        "a folder of the kernel's",
        lambda p: tune_in("/proc/run", p.saved(net(relu()))),
        ExitCode.BAD_FOLDER,
        "/proc/run cannot be written: .*; choose a folder of yours with --out",
    ),
    Bad(
        "other files", with_a_thesis, ExitCode.BAD_FOLDER, "'thesis.tex' and no run .* choose anot"
    ),
    Bad(
        "in use", in_use, ExitCode.BAD_FOLDER, rf"in use by the tunerd with pid {os.getpid()}; wai"
    ),
    Bad(
        "of another model",
        other_run(model_name="other", model_digest="d" * 64),
        ExitCode.BAD_FOLDER,
        "run of model 'other'.*not of 'net'.*choose another folder",
    ),
    Bad(
        "another share", other_run(pct=50), ExitCode.BAD_FOLDER, "share 50%.*share 100%.*choose an"
    ),
    Bad("another TVM", other_run(tvm_version="0.1"), ExitCode.BAD_FOLDER, r"TVM 0\.1,? .*TVM 0\.2"),
    Bad(
        "slices of another kind",
        other_run(slice_kind="whole"),
        ExitCode.BAD_FOLDER,
        "slice kind whole.*slice kind cpu.*choose another folder",
    ),
]


@pytest.mark.parametrize("bad", FOLDERS, ids=lambda bad: bad.what)
def test_a_folder_that_cannot_be_used(
    bad: Bad, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    check(bad, place, capsys)
