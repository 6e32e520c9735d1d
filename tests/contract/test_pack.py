"""Several shares in one artifact: what it holds, which of it is loaded, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import tunerd
from tests.contract.test_loading import edit_manifest
from tests.lib.artifact_fixtures import CORES, tiny_artifact
from tests.lib.fresh_python import run_python
from tests.lib.models import conv_net
from tunerd.artifacts.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    PACKED_VERSION,
    nearest,
    obtained_text,
    read_manifest,
    read_variants,
    sha256_of,
)
from tunerd.artifacts.packing import pack_shares
from tunerd.cli.app import app
from tunerd.cli.errors import run
from tunerd.errors import ExitCode, FolderError, InputError
from tunerd.system import host

Captured = pytest.CaptureFixture[str]
CORES_HERE = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return artifacts for 1, 2 and 8 cores; that for 2 has the default schedules."""
    place = tmp_path_factory.mktemp("sources")
    for cores, pct in ((1, 10), (2, 25), (8, 100)):
        proof = dataclasses.replace(CORES, sm_count=cores, device_sm_count=8)
        tiny_artifact(place / str(cores), tuned=cores != 2, proof=proof, pct=pct)
    return {cores: place / str(cores) for cores in (1, 2, 8)}


@pytest.fixture(scope="module")
def packed(sources: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("packed") / "artifact"
    pack_shares([sources[8], sources[1], sources[2]], to)
    return to


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "copy"))


def variants_of(*counts: Sequence[int]) -> list[dict[str, Any]]:
    return [{"share": {"sm_counts": list(each)}} for each in counts]


# --- the folder --------------------------------------------------------------------------------


def test_equal_weights_are_stored_once(packed: Path, sources: dict[int, Path]) -> None:
    assert sorted(path.name for path in packed.iterdir()) == [
        MANIFEST,
        "model-1.so",
        "model-2.so",
        "weights.bin",
    ]  # the libraries for 1 and 8 cores have equal bytes, too
    for cores, source in sources.items():
        (variant,) = (v for v in read_variants(packed) if v["share"]["sm_counts"] == [cores])
        for name, sha in read_manifest(source)["files"].items():
            assert sha256_of(packed / variant["stored_as"][name]) == sha


def test_a_variant_keeps_the_manifest_that_it_had_alone(
    packed: Path, sources: dict[int, Path]
) -> None:
    variants = read_variants(packed)
    assert [v["share"]["pct"] for v in variants] == [10, 25, 100]
    for variant, source in zip(variants, sources.values(), strict=True):
        assert {k: v for k, v in variant.items() if k != "stored_as"} == read_manifest(source)


def test_readers_of_one_share_refuse_a_packed_artifact(packed: Path) -> None:
    """Those of earlier releases read format 1 alone, and name the format that they found."""
    assert json.loads((packed / MANIFEST).read_text())["format_version"] == PACKED_VERSION
    assert PACKED_VERSION != FORMAT_VERSION
    with pytest.raises(tunerd.LoadError, match=r"holds 3 shares, 10%, 25% and 100%, where one"):
        read_manifest(packed)


def test_other_weights_are_stored_beside(sources: dict[int, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(sources[2], tmp_path / "other"))
    with (other / "weights.bin").open("ab") as file:
        file.write(b"\0" * 64)
    sha = sha256_of(other / "weights.bin")
    edit_manifest(other, lambda manifest: manifest["files"].update({"weights.bin": sha}))
    first, second = pack_shares([sources[1], other], tmp_path / "to")
    assert first["stored_as"]["weights.bin"] == "weights.bin"
    assert second["stored_as"]["weights.bin"] == "weights-2.bin"
    assert sha256_of(tmp_path / "to" / "weights-2.bin") == sha


def test_a_packed_artifact_may_be_packed_again_with_another_share(
    sources: dict[int, Path], tmp_path: Path
) -> None:
    pack_shares([sources[1], sources[8]], tmp_path / "to")
    pack_shares([tmp_path / "to", sources[2]], tmp_path / "to")
    assert [v["share"]["sm_counts"] for v in read_variants(tmp_path / "to")] == [[1], [2], [8]]


# --- which variant -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "tuned_for"),
    [(132, [132]), (52, [52]), (12, [12]), (1, [12]), (1000, [132]), (24, [12]), (26, [52])],
)
def test_the_nearest_share_is_the_one_of_the_smallest_ratio(
    seen: int, tuned_for: list[int]
) -> None:
    assert nearest(variants_of([132], [12], [52]), seen)["share"]["sm_counts"] == tuned_for


@pytest.mark.parametrize("counts", [([1], [4]), ([4], [1])])
def test_of_two_as_near_the_one_for_fewer_sms_is_taken(counts: tuple[list[int], ...]) -> None:
    assert nearest(variants_of(*counts), 2)["share"]["sm_counts"] == [1]


LOAD = """
import json, sys, warnings
import numpy as np
import tunerd
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = tunerd.load(sys.argv[1])
outputs = model(*(np.ones(spec.shape, spec.dtype) for spec in model.inputs))
print(json.dumps({
    "tuned_for": model.manifest["share"]["sm_counts"],
    "outputs": {name: array.tolist() for name, array in outputs.items()},
    "warned": [str(w.message) for w in caught if w.category is tunerd.MismatchWarning],
}))
"""


def loaded_on(artifact: Path, cores: set[int]) -> dict[str, Any]:
    """Load and run an artifact in a process that may use these cores."""
    script = f"import sys; sys.argv = ['', {str(artifact)!r}]\n{LOAD}"
    done = run_python(script, cores=cores)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_cores_of_the_process_decide_which_kernels_run(packed: Path) -> None:
    on_one = loaded_on(packed, {CORES_HERE[0]})
    assert (on_one["tuned_for"], on_one["warned"]) == ([1], [])
    if len(CORES_HERE) >= 2:
        on_two = loaded_on(packed, set(CORES_HERE[:2]))
        assert (on_two["tuned_for"], on_two["warned"]) == ([2], [])
        for name, values in on_one["outputs"].items():
            np.testing.assert_allclose(values, on_two["outputs"][name], rtol=1e-4, atol=1e-4)


def test_a_share_that_is_not_there_is_warned_of(sources: dict[int, Path], tmp_path: Path) -> None:
    pack_shares([sources[2], sources[8]], tmp_path / "to")
    found = loaded_on(tmp_path / "to", {CORES_HERE[0]})
    assert found["tuned_for"] == [2]
    (said,) = found["warned"]
    assert "sees 1 core; the nearest kernels are tuned for 2 cores (25% of the device)" in said


@pytest.mark.parametrize(
    ("counts", "is_cuda", "text"),
    [
        ([1], False, "1 core"),
        ([2], False, "2 cores"),
        ([1], True, "1 SM"),
        ([1, 2], True, "1 or 2 SMs"),
    ],
)
def test_what_was_obtained_is_said_in_the_singular_and_the_plural(
    counts: list[int], is_cuda: bool, text: str
) -> None:
    assert obtained_text(counts, is_cuda=is_cuda) == text


# --- what is refused ---------------------------------------------------------------------------


def test_one_share_is_nothing_to_pack(sources: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds one share; name the runs"):
        pack_shares([sources[1]], tmp_path / "to")


def test_a_share_that_comes_twice_is_refused(sources: dict[int, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="were both tuned for 2 cores; leave one"):
        pack_shares([sources[2], sources[1], sources[2]], tmp_path / "to")
    with pytest.raises(InputError, match="were both tuned for 1 core; leave one"):
        pack_shares([sources[1], sources[2], sources[1]], tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda m: m["model"].update(digest="0" * 64), "another model"),
        (lambda m: m["inputs"][0].update(shape=[9]), "another set of inputs"),
        (lambda m: m["target"].update(kind="cuda"), "another kind of target"),
        (lambda m: m["target"].update(json='{"mcpu": "z80"}'), "another architecture"),
        (lambda m: m["share"].update(device="Abacus 1"), "another device"),
        (lambda m: m["share"].update(sm_counts=[]), "does not say for how many SMs"),
        (lambda m: m["files"].update({"model.so": "0" * 64}), "was changed: its sha256"),
    ],
)
def test_artifacts_that_do_not_belong_together_are_refused(
    sources: dict[int, Path], tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    other = Path(shutil.copytree(sources[2], tmp_path / "other"))
    edit_manifest(other, edit)
    with pytest.raises(InputError, match=said):
        pack_shares([sources[1], other], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_folder_of_something_else_is_not_replaced(
    sources: dict[int, Path], tmp_path: Path
) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "thesis.txt").write_text("years of work")
    with pytest.raises(FolderError, match="holds files that are no artifact"):
        pack_shares([sources[1], sources[2]], tmp_path / "to")


@pytest.mark.parametrize("name", ["model-1.so", "model-2.so", "weights.bin"])
def test_one_changed_byte_of_any_variant_is_refused(copy: Path, name: str) -> None:
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(tunerd.LoadError, match=f"{name} was changed: its sha256 is"):
        tunerd.load(copy)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(variants=[]),
        lambda m: m.pop("variants"),
        lambda m: m["variants"].append(None),
        lambda m: m["variants"][0].pop("files"),
        lambda m: m["variants"][0]["share"].update(sm_counts=[]),
        lambda m: m["variants"][0]["inputs"].pop(),
        lambda m: m["variants"][0]["stored_as"].update({"model.so": "../model.so"}),
        lambda m: m["variants"][0].update(stored_as=["model.so"]),
    ],
)
def test_a_damaged_manifest_of_several_shares_is_refused(
    copy: Path, edit: Callable[[dict[str, Any]], object]
) -> None:
    edit_manifest(copy, edit)
    with pytest.raises(tunerd.LoadError, match="damaged"):
        tunerd.load(copy)


# --- the command line, with what was really tuned ----------------------------------------------


def test_bench_of_several_shares_asks_for_one(packed: Path, capsys: Captured) -> None:
    assert run(app, ["bench", str(packed)]) == ExitCode.BAD_INPUT
    said = capsys.readouterr().err
    assert "holds several shares, 10%, 25% and 100%; name the one to measure at" in said
    assert "--cpu-pct" in said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return runs that tuned a small model for one core and for two."""
    if host.facts().usable_cores != 2:
        pytest.skip("50% and 100% are one core and two on a machine with two")
    place = tmp_path_factory.mktemp("runs")
    onnx.save(conv_net(channels=4), place / "net.onnx")
    for pct in (50, 100):
        argv = [sys.executable, "-m", "tunerd", "tune", str(place / "net.onnx")]
        argv += ["--cpu-pct", str(pct), "--out", str(place / str(pct))]
        argv += ["--trials", "2", "--tuners", "1"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode < ExitCode.BAD_INPUT, done.stderr
    return {pct: place / str(pct) for pct in (50, 100)}


@pytest.mark.slow
@pytest.mark.nightly
def test_runs_for_one_core_and_two_are_packed_loaded_benched_and_compared(
    runs: dict[int, Path], tmp_path: Path, capsys: Captured
) -> None:
    to = tmp_path / "both"
    assert run(app, ["pack", str(runs[100]), str(runs[50]), "--to", str(to), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [v["sm_counts"] for v in document["variants"]] == [[1], [2]]
    # Weights that kernels for two cores want in another layout are stored for each.
    stored_as = [v["weights.bin"] for v in document["variants"]]
    assert stored_as in (["weights.bin"] * 2, ["weights.bin", "weights-2.bin"])
    assert loaded_on(to, {CORES_HERE[0]})["tuned_for"] == [1]
    assert loaded_on(to, set(CORES_HERE[:2]))["tuned_for"] == [2]
    for pct, cores in ((50, 1), (100, 2)):
        assert run(app, ["bench", str(to), "--cpu-pct", str(pct), "--json"]) == 0
        benched = json.loads(capsys.readouterr().out)
        assert benched["tuned_for_sm_counts"] == [cores]
        assert {p["sm_count"] for p in benched["proofs"]} == {cores}
    assert run(app, ["compare", str(runs[50]), str(runs[100])]) == ExitCode.NOT_COMPARABLE
    assert "cores: 1 and 2" in capsys.readouterr().out
    finished = {ExitCode.BETTER, ExitCode.CANNOT_TELL}
    assert run(app, ["compare", str(runs[50]), str(runs[50]), "--json"]) in finished
    stored = json.loads(capsys.readouterr().out)
    assert (stored["end_to_end"]["change"]["ratio"], stored["measured"]) == (1.0, None)
    argv = ["compare", str(runs[50] / "artifact"), str(to), "--cpu-pct", "50", "--json"]
    assert run(app, argv) in {*finished, ExitCode.REGRESSION}
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert (measured["pct"], measured["proof"]["sm_count"]) == (50, 1)
    assert len(measured["run_secs"]) == 3
