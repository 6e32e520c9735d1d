"""Tables of a gemms.json, beside those of the paper (arXiv 1901.00041, Table 1)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab.colocation.figures import ratio, ratio_text
from tunerd.vocabulary.verdict import Interval

Shape = tuple[int, int, int]  # rows, columns, depth

# What the paper found on a V100: one batched kernel over the next best way, at R = 10, at R = 20
# and as the geometric mean over 2 <= R <= 120.
SHAPES: Mapping[Shape, tuple[str, tuple[float, float, float]]] = {
    (512, 1, 512): ("a step of an RNN", (1.21, 2.14, 2.48)),
    (256, 128, 1152): ("conv2_2 of ResNet-18", (1.68, 2.88, 3.23)),
    (256, 256, 256): ("a square", (2.42, 2.47, 4.93)),
}
OVER_TIME = 7.71  # of conv2_2 over one after another, in the paper's text
MOST_COUNT = 120  # of the paper's mean
_ONE_KERNEL = ("bmm", "super-kernel")
_APART = ("time", "space", "processes")  # the last only where R has ten parts
_ADDRESSES = "addresses"  # cuBLAS's batched call by these, which older documents do not have


def key_of(precision: str, shape: Shape, count: int) -> str:
    return f"{precision} {'x'.join(map(str, shape))} {count}"


def tables(document: Mapping[str, Any]) -> str:
    """Return Markdown: for each precision and shape the rates, and what the paper's claims are."""
    made = [f"{document['device']}, PyTorch {document['torch']}"]
    precisions = dict.fromkeys(key.split()[0] for key in document["found"])
    for precision in precisions:
        for shape in SHAPES:
            found = _of(document, precision, shape)
            if found:
                made.append(_rates(precision, shape, found) + "\n" + _claims(shape, found))
    return "\n\n".join(made) + "\n"


def mean_ratio(found: Mapping[int, Mapping[str, Any]], way: str, rivals: Sequence[str]) -> Interval:
    """Return the geometric mean over R of a way over the better of its rivals, turn by turn."""
    logs = [
        np.log(_values(each, way)) - np.log(_values(each, _better(each, rivals)))
        for each in found.values()
    ]
    turns = np.exp(np.mean(logs, axis=0))
    return ratio(list(turns), [1.0] * len(turns))


def _of(document: Mapping[str, Any], precision: str, shape: Shape) -> dict[int, Mapping[str, Any]]:
    """Return what was found by R, where every way of one process ran."""
    said: dict[int, Mapping[str, Any]] = {}
    for key, found in document["found"].items():
        kind, name, count = key.split()
        is_whole = {"time", "space", *_ONE_KERNEL} <= set(found["per_sec"])
        if kind == precision and name == "x".join(map(str, shape)) and is_whole:
            said[int(count)] = found["per_sec"]
    return said


def _values(rates: Mapping[str, Sequence[float]], way: str) -> Any:
    return np.asarray(rates[way])


def _better(rates: Mapping[str, Sequence[float]], ways: Sequence[str]) -> str:
    ran = [way for way in ways if way in rates]
    return max(ran, key=lambda way: statistics.median(rates[way]))


def _rates(precision: str, shape: Shape, found: Mapping[int, Mapping[str, Sequence[float]]]) -> str:
    rows, columns, depth = shape
    flops = 2 * rows * columns * depth
    lines = [
        f"## {precision}, {rows} x {columns} x {depth}: {SHAPES[shape][0]}",
        "",
        "| R | time, us each | space | processes | bmm | super-kernel | by addresses | "
        "bmm over time | bmm over space | super-kernel over bmm | over that by addresses | "
        "TFLOP/s of the best |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for count, rates in sorted(found.items()):
        cells = [
            f"{1e6 / statistics.median(rates[way]):.3g}" if way in rates else "-"
            for way in (*_APART, *_ONE_KERNEL, _ADDRESSES)
        ]
        for above, below in (
            ("bmm", "time"), ("bmm", "space"), ("super-kernel", "bmm"),
            ("super-kernel", _ADDRESSES),
        ):  # fmt: skip
            known = below in rates
            cells.append(ratio_text(ratio(rates[above], rates[below])) if known else "-")
        best = statistics.median(rates[_better(rates, list(rates))])
        lines.append(f"| {count} | {' | '.join(cells)} | {best * flops / 1e12:.3g} |")
    return "\n".join(lines) + "\n"


def _claims(shape: Shape, found: Mapping[int, Mapping[str, Sequence[float]]]) -> str:
    lines = []
    said = dict(zip((10, 20, None), SHAPES[shape][1], strict=True))
    within = {count: rates for count, rates in found.items() if 2 <= count <= MOST_COUNT}
    for way in _ONE_KERNEL:
        for count, factor in said.items():
            if count is not None and count not in found:
                continue
            chosen = within if count is None else {count: found[count]}
            gain = mean_ratio(chosen, way, _APART)
            where = f"mean of R up to {MOST_COUNT}" if count is None else f"R = {count}"
            lines.append(
                f"- {way} over the next best, {where}: {ratio_text(gain)}; the paper's {factor}: "
                f"{gain.is_above(factor)}"
            )
        if shape == (256, 128, 1152):
            gain = mean_ratio(within, way, ["time"])
            lines.append(
                f"- {way} over one after another, mean: {ratio_text(gain)}; the paper's "
                f"{OVER_TIME}: {gain.is_above(OVER_TIME)}"
            )
    return "\n".join(lines)
