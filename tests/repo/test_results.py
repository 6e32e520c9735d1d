"""The tables and pictures of results are what their scripts make of what was kept."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lab.colocation import latency_table, saturation_table, tail_plot
from lab.cpu import models_in_processes
from lab.lab import load
from lab.scaling import gpus
from lab.start import first_trial, lowering
from tests.lib import ROOT
from tests.lib.repository import LAB
from tunerd.studies.matrix.folder import read as read_matrix
from tunerd.studies.matrix.result import result_from, result_json

ON_TWO_CORES = "cpu-light_squeezenet-against-stock"


@pytest.mark.parametrize(
    ("script", "folder", "table", "picture", "title"),
    [
        ("shares/plot_shares.py", "h200-shares", "tables.txt", "shares.svg", "tuned at one share"),
        (
            "shares/plot_shares.py",
            "h200-claims",
            "tables.txt",
            "claims.svg",
            "as if it were the only one",
        ),
        (
            "shares/plot_shares.py",
            "h200-claims-fp16",
            "tables.txt",
            "claims.svg",
            "as if it were the only one, fp16",
        ),
        (
            "shares/plot_profiles.py",
            "h200-profiles",
            "table.txt",
            "profiles.svg",
            "default schedules over",
        ),
        (
            "shares/plot_profiles.py",
            "h200-profile-tuned",
            "table.txt",
            "profiles.svg",
            "tuned at 40%, over",
        ),
    ],
)
def test_tables_and_pictures_are_what_their_scripts_make_of_the_samples(
    script: str, folder: str, table: str, picture: str, title: str, tmp_path: Path
) -> None:
    kept = ROOT / "results" / folder
    (label,) = re.findall(r'aria-label="([^"]*)"', (kept / picture).read_text())
    assert title in label
    command = [sys.executable, LAB / script, kept, "--title", label]
    command += ["--out", tmp_path / picture]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == (kept / table).read_text()
    assert (tmp_path / picture).read_text() == (kept / picture).read_text()


def is_same(one: Any, other: Any) -> bool:
    """Whether two documents say the same; the last digits of a logarithm are the CPU's."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(v, other[k]) for k, v in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "results").rglob("matrix-result.json*")),
    ids=lambda p: "/".join(p.parts[-3:-1]),
)
def test_a_matrix_says_what_its_samples_say(path: Path) -> None:
    said = load(path)
    asked = {"shares": said["findings"]["shares"], "model": {"name": ""}, "unit": said["unit"]}
    made = result_json(result_from(read_matrix(path.parent), {}, asked))
    assert is_same(json.loads(json.dumps(made["findings"])), said["findings"])
    assert f"{said['rounds']} rounds" in (path.parent / "report.md").read_text()


@pytest.mark.parametrize(
    ("script", "folders", "text"),
    [
        ("shares/kernels_in_models.py", ["h200-shares"], "kernels.txt"),
        ("shares/kernels_in_processes.py", ["h200-shares"], "processes.txt"),
        ("shares/trace_model.py table", ["h200-trace"], "table.txt"),
        ("shares/worth_of_shares.py", ["h200-claims-fp16"], "worth.txt"),
        ("shares/worth_of_shares.py --shares 10,40,100", ["h200-claims"], "worth.txt"),
        ("shares/worth_of_shares.py --shares 10,40,100", ["h200-shares"], "worth.txt"),
        ("stock/compare_searches.py", [f"{ON_TWO_CORES}/searches.json.xz"], "searches.txt"),
        (
            "stock/compare_searches.py --chance",
            [f"{ON_TWO_CORES}/{name}.json.xz" for name in ("more-searches", "searches")],
            "more-searches.txt",
        ),
    ],
)
def test_a_table_is_what_its_script_makes_of_what_was_kept(
    script: str, folders: list[str], text: str
) -> None:
    kept = [ROOT / "results" / folder for folder in folders]
    name, *subcommand = script.split()
    command = [sys.executable, LAB / name, *subcommand, *kept]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    folder = kept[-1] if kept[-1].is_dir() else kept[-1].parent
    assert done.stdout == (folder / text).read_text()


def test_the_picture_of_tails_is_what_its_script_makes_of_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, made = ROOT / "results" / "colocation", tmp_path / "tails.svg"
    samples = [kept / f"{name}.json.xz" for name in ("resnet50-h200-all", "encoder-h200-all")]
    monkeypatch.setattr(sys, "argv", ["tail_plot", *map(str, samples), "--out", str(made)])
    tail_plot.main()
    assert made.read_text() == (kept / "tails.svg").read_text()


@pytest.mark.parametrize(
    ("when", "parts", "text"),
    [
        ("later", ("beside", "bursts", "faults", "mixed", "replicas"), "latency-h200-later"),
        ("last", ("faults",), "faults-h200-last"),
        ("more", ("faults", "mixed"), "latency-h200-more"),
        ("again", ("faults", "mixed"), "latency-h200-again"),
        ("fifth", ("faults", "mixed"), "latency-h200-fifth"),
    ],
)
def test_a_table_of_tails_is_what_its_script_makes_of_the_samples(
    when: str, parts: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    kept = ROOT / "results" / "colocation"
    for part in parts:
        document = load(kept / f"{part}-h200-{when}.json.xz")
        (tmp_path / f"{part}.json").write_text(json.dumps(document))
    assert latency_table.tables(tmp_path) == (kept / f"{text}.txt").read_text()


# All latencies of these are kept; of another every eighth, of yet another none.
@pytest.mark.parametrize(
    "name",
    [
        "engine-h200-last",
        "encoder-h200-all",
        "encoder-h200-inductor",
        "resnet50-h200-all",
        "resnet50-mps-h200",
        "resnet50-mps-h200-again",
        "encoder-fp32-h200",
        "resnet50-fp32-h200",
    ],
)
def test_a_table_of_rates_is_what_its_script_makes_of_the_samples(name: str) -> None:
    kept = ROOT / "results" / "colocation"
    made = saturation_table.table(load(kept / f"{name}.json.xz"))
    assert made == (kept / f"{name}.txt").read_text()


@pytest.mark.parametrize("part", ["", "every-batch", "seven-minutes", "h100"])
def test_the_comparison_with_stock_is_what_its_runs_say(part: str, tmp_path: Path) -> None:
    kept = ROOT / "results" / "h200-light_resnet50-against-stock" / part
    with tarfile.open(kept / "runs.tar.xz") as runs:
        runs.extractall(tmp_path, filter="data")
    for name in {"comparison.json", "remeasured.json"} & set(os.listdir(kept)):
        shutil.copy(kept / name, tmp_path)
    command = [sys.executable, LAB / "stock" / "summary.py", tmp_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == (kept / "benchmark.txt").read_text()
    said, found = (json.loads((at / "summary.json").read_bytes()) for at in (kept, tmp_path))
    assert is_same(found, said)


def pages_of(folder: Path) -> str:
    return "\n".join(page.read_text() for page in sorted(folder.glob("*.md")))


@pytest.mark.parametrize(
    "name",
    ["first-trial", "h200-first-trial", "h100-bytecode", "lowering-early-1", "lowering-early-2"],
)
def test_the_steps_of_a_start_are_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "start"
    starts = json.loads((kept / f"{name}.json").read_bytes())["starts"]
    table = first_trial.shown(starts)
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert all(row in pages_of(kept) for row in table.split("\n"))


def test_the_table_of_lowering_is_what_was_measured() -> None:
    kept = ROOT / "results" / "start"
    lowered = json.loads((kept / "lowering.json").read_bytes())["lowered"]
    table = lowering.shown(lowered)
    assert (kept / "lowering.txt").read_text() == f"{table}\n"
    assert table in pages_of(kept)


@pytest.mark.parametrize("name", ["1", "2"])
def test_the_table_of_processes_is_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "cpu-processes"
    rounds = json.loads((kept / f"{name}.json").read_bytes())["rounds"]
    table = models_in_processes.shown(rounds)
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert table in (kept / "README.md").read_text()


@pytest.mark.parametrize("name", ["h100", "h100-apart"])
def test_the_table_of_gpus_is_what_was_measured(name: str) -> None:
    kept = ROOT / "results" / "h200-scaling"
    table = gpus.shown(json.loads((kept / f"{name}.json").read_bytes())["runs"])
    assert (kept / f"{name}.txt").read_text() == f"{table}\n"
    assert table in (kept / "README.md").read_text()
