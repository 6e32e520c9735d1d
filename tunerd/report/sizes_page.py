"""A model that was tuned at several sizes: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from tunerd.report import html
from tunerd.report.figures import rivals
from tunerd.report.run_result import next_try, run_json
from tunerd.report.run_view import RunView
from tunerd.report.task_section import ratio_cell
from tunerd.report.terminal import shown
from tunerd.report.view import Grid, Items, Section, View
from tunerd.settings.texts import TENANTS
from tunerd.system.text import count_text, secs_text
from tunerd.vocabulary.outcome import Outcome

_HEADS = (
    "size", "tuned", "default", "default / tuned", "tasks tuned",
    "from the store", "trials",
)  # fmt: skip

SizeResult = tuple[str, RunView, Outcome, Path]  # the size, its run, how that ended, its folder


def sizes_page(name: str, results: Sequence[SizeResult], padded: Sequence[str]) -> str:
    """Return the page about all sizes; each run has one of its own in its folder."""
    places = Items([f"{size}: {place}" for size, _, _, place in results])
    about = "Each size has a run folder with a report and an artifact of its own."
    return html.page(
        View(
            f"{name}: {count_text(len(results), 'size')}",
            (
                Section("Sizes", [_grid(results)], padding_sentence(padded)),
                Section("Runs", [places], about),
            ),
        )
    )


def sizes_result(results: Sequence[SizeResult], padded: Sequence[str]) -> RenderableType:
    """Return the same for rich to print."""
    return shown((_grid(results), padding_sentence(padded)))


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
        "next_try": next_try_of(results) or None,
    }


def next_try_of(results: Sequence[SizeResult]) -> str:
    """Say what a person would try next of runs that ended so, or nothing."""
    said = (next_try(outcome, view.settings.get("precision")) for _, view, outcome, _ in results)
    return next(filter(None, said), "")


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
    beside = [next(iter(rivals(outcome)), None) for _, _, outcome, _ in results]
    rows = [
        (
            size,
            ratio_cell(rival.compared if rival else None).text,
            secs_text(outcome.end_to_end.new_secs),
            secs_text(outcome.end_to_end.base_secs),
            ratio_cell(outcome.end_to_end).text,
            f"{sum(task.is_tuned for task in outcome.tasks)} of {len(outcome.tasks)}",
            str(sum(task.taken is not None for task in outcome.tasks)),
            f"{view.trials:,}",
        )
        for (size, view, outcome, _), rival in zip(results, beside, strict=True)
    ]
    names = dict.fromkeys(rival.name for rival in beside if rival)
    heads = (_HEADS[0], f"{' or '.join(names)} / tuned", *_HEADS[1:])
    grid = Grid(heads, rows, range(1, len(heads)))
    return grid if names else grid.only(*_HEADS)
