"""Every figure of a README comes from a file of results."""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lib import ROOT
from tests.lib.readme_commands import DOCUMENTS
from tests.lib.repository import RESULTS, links_of, text_of
from tunerd.system.text import TIMES

EXPERIMENTS = sorted(path for path in RESULTS.iterdir() if path.is_dir())

UNITS = {"s": 1.0, "ms": 1e3, "µs": 1e6, "min": 1 / 60}
_FIGURE = re.compile(
    rf"(?<![A-Za-z\d])(\d[\d,]*(?:\.\d+)?)\s?(ms|µs|s|min|SMs|trials|%|{TIMES}|times)(?![\w/])"
)


def figures(text: str) -> set[tuple[str, str]]:
    """Return each number of a text that has a unit, without thousands separators, and the unit."""
    return {(number.replace(",", ""), unit) for number, unit in _FIGURE.findall(text)}


def untraceable(text: str, *folders: Path) -> set[tuple[str, str]]:
    """Return the figures of `text` that no file below the folders has.

    A file has a figure where the number and its unit stand in it; a JSON document also where a
    value of an object in it rounds to the number, durations in seconds. Markdown is a summary.
    """
    left = figures(text)
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if left and path.is_file() and path.suffix != ".md":
            content = content_of(path)
            left -= figures(content)
            if path.name.endswith((".json", ".json.xz")):
                values = list(scalars(json.loads(content)))
                left = {f for f in left if not any(rounds_to(v, *f) for v in values)}
    return left


def content_of(path: Path) -> str:
    """Return a file's text, unpacked where it is packed; samples and archives count for nothing."""
    if path.suffix != ".xz":
        return text_of(path)
    if path.name.endswith((".jsonl.xz", ".tar.xz")):
        return ""
    return lzma.decompress(path.read_bytes()).decode()


def scalars(document: Any) -> Iterator[float]:
    """Yield the numbers that are values of objects: what lists hold are raw samples."""
    if isinstance(document, dict):
        for value in document.values():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
            yield from scalars(value)
    elif isinstance(document, list):
        for value in document:
            yield from scalars(value)


def rounds_to(value: float, number: str, unit: str) -> bool:
    decimals = len(number.partition(".")[2])
    return f"{value * UNITS.get(unit, 1.0):.{decimals}f}" == number


def section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_figure_among_the_results_is_in_a_file_of_results() -> None:
    assert untraceable(section(DOCUMENTS[0].read_text(), "Results"), ROOT / "results") == set()


# What `results/figures.yaml` says of figures that are in no file as they stand.
EXPLAINED: dict[str, dict[str, str]] = yaml.safe_load((RESULTS / "figures.yaml").read_text())


def test_every_figure_of_the_index_of_results_is_in_a_file_below_it() -> None:
    assert untraceable((RESULTS / "README.md").read_text(), RESULTS) == set()


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_an_experiment_is_told_in_a_page(folder: Path) -> None:
    assert len((folder / "README.md").read_text().splitlines()) <= 60


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_every_figure_of_an_experiment_is_in_a_file_of_its_own_or_of_one_it_names(
    folder: Path,
) -> None:
    text = "\n".join(page.read_text() for page in sorted(folder.glob("*.md")))
    links = [(folder / link).resolve() for link in links_of(text)]
    assert all(link.exists() for link in links)
    named = [link for link in links if link.is_dir() and link != folder]
    explained = {tuple(figure.rsplit(" ", 1)) for figure in EXPLAINED.get(folder.name, {})}
    assert untraceable(text, folder, *named) == explained


@pytest.mark.parametrize(
    ("figure", "said"),
    [pair for folder in EXPLAINED.values() for pair in folder.items()],
)
def test_a_figure_that_is_computed_is_what_comes_out(figure: str, said: str) -> None:
    number, _ = figure.rsplit(" ", 1)
    if re.fullmatch(r"[-+*/(). 0-9]+", said):
        assert rounds_to(eval(said), number, "")


def test_the_index_of_results_has_a_line_for_each_experiment() -> None:
    index = (RESULTS / "README.md").read_text()
    assert len(index.splitlines()) <= 60
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|", index, re.MULTILINE)
    assert sorted(listed) == [folder.name for folder in EXPERIMENTS]


def test_a_figure_without_a_source_is_found(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"tuned": {"p50_secs": 0.0026184}, "raw": [0.5]}')
    (tmp_path / "run.log").write_text("attached, 52 of 132 SMs obtained")
    (tmp_path / "README.md").write_text("3.1 ms")
    text = f"2.62 ms on 132\N{NO-BREAK SPACE}SMs, not 3.1 ms, nor 500 ms, nor 7.3{TIMES}"
    assert untraceable(text, tmp_path) == {("3.1", "ms"), ("500", "ms"), ("7.3", TIMES)}
