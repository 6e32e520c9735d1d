"""A model that was tuned at several sizes: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report.components import section
from tunerd.report.grid import Grid
from tunerd.report.layout import page
from tunerd.report.markup import element
from tunerd.report.run_result import run_json
from tunerd.report.run_view import RunView
from tunerd.settings.texts import TENANTS
from tunerd.system.text import TIMES, count_text, ratio_texts, secs_text
from tunerd.vocabulary.outcome import Outcome
from tunerd.vocabulary.verdict import Verdict

_HEADS = ("size", "default", "tuned", "ratio", "tasks tuned", "from the store", "trials")

SizeResult = tuple[str, RunView, Outcome, Path]  # the size, its run, how that ended, its folder


def sizes_page(name: str, results: Sequence[SizeResult], padded: Sequence[str]) -> str:
    """Return the page about all sizes; each run has one of its own in its folder."""
    title = f"{name}: {count_text(len(results), 'size')}"
    return page(
        title,
        section("Sizes", _grid(results).page(), lead=padding_sentence(padded)),
        section(
            "Runs",
            element("ul", *(element("li", f"{size}: {place}") for size, _, _, place in results)),
            lead="Each size has a run folder with a report and an artifact of its own.",
        ),
        head=element("header", element("h1", element("bdi", title)), class_="neutral"),
    )


def sizes_result(results: Sequence[SizeResult], padded: Sequence[str]) -> RenderableType:
    """Return the same for rich to print."""
    return Group(_grid(results).terminal(), Text(padding_sentence(padded)))


def sizes_json(
    results: Sequence[SizeResult], sizes: Sequence[Mapping[str, int]], padded: Sequence[str]
) -> dict[str, Any]:
    """Return the same for json.dumps, each size as `tunerd tune --json` has a run."""
    return {
        "sizes": [
            {"sizes": dict(each), "run": str(folder), **run_json(view, outcome)}
            for each, (_, view, outcome, folder) in zip(sizes, results, strict=True)
        ],
        "padded": list(padded),
    }


def padding_sentence(padded: Sequence[str]) -> str:
    """Say what becomes of inputs whose size is none of those that are compiled."""
    if padded == (TENANTS,):
        return "Fewer requests than that take the next larger number, whose other lanes are idle."
    if not padded:
        return (
            "Inputs have one of these sizes: padding would change results, as ONNX Runtime shows."
        )
    return (
        f"Inputs of other sizes are padded in {', '.join(padded)} to the next larger one, which "
        "changes no result in ONNX Runtime."
    )


def _grid(results: Sequence[SizeResult]) -> Grid:
    rows = [
        (
            size,
            secs_text(outcome.end_to_end.base_secs),
            secs_text(outcome.end_to_end.new_secs),
            "cannot tell"
            if outcome.end_to_end.verdict is Verdict.CANNOT_TELL
            else ratio_texts(outcome.end_to_end.interval)[0] + TIMES,
            f"{sum(task.is_tuned for task in outcome.tasks)} of {len(outcome.tasks)}",
            str(sum(task.taken is not None for task in outcome.tasks)),
            f"{view.trials:,}",
        )
        for size, view, outcome, _ in results
    ]
    return Grid(_HEADS, rows, range(1, len(_HEADS)))
