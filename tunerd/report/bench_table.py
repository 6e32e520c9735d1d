"""What `tunerd bench` found, on the terminal and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.artifacts.manifest import obtained_text
from tunerd.report import terminal
from tunerd.report.view import Cell, Grid
from tunerd.runner.load import Repeats
from tunerd.stats.tail import PERCENTILES, samples_needed
from tunerd.studies.bench.artifact import BenchResult
from tunerd.studies.bench.bench import Bench, Condition, Speed
from tunerd.system.text import (
    TIMES,
    UNKNOWN,
    count_text,
    one_line,
    percent_text,
    ratio_texts,
    secs_text,
    significant,
)
from tunerd.vocabulary import to_json


def bench_table(result: BenchResult) -> RenderableType:
    """Return a line per slice and condition, the slow-down and the spread, for rich to print."""
    title = Text(one_line(result.request.title(result.proofs[0])), style="bold")
    lines: list[RenderableType] = [title, _speeds(result.bench, result.hog_gbps)]
    lines += [Text(sentence) for sentence in _sentences(result.bench)]
    if result.request.is_packed:
        tuned = obtained_text(result.tuned_for_sm_counts, is_cuda=result.request.kind == "mps")
        lines.append(Text(f"with the kernels tuned for {tuned}"))
    return Group(*lines)


def bench_json(result: BenchResult) -> dict[str, Any]:
    """Return the figures of a bench for json.dumps; `rounds_json` has what they come from."""
    request, bench = result.request, result.bench
    first = bench.alone.replicas[0]
    measured = (bench.alone, bench.beside, bench.neighbour)
    sides = {str(s.condition): s for s in measured if s is not None}
    return {
        "artifact": str(request.artifact),
        "model": request.model,
        "pct": request.pct,
        "beside": request.beside,
        "duration_secs": request.duration_secs,
        "samples": first.samples,
        "samples_needed": {f"p{p}": samples_needed(p) for p in PERCENTILES},
        "p50_secs": first.p50_secs,
        "p95_secs": first.p95_secs,
        "p99_secs": first.p99_secs,
        "inferences_per_sec": first.per_sec,
        "slowdown": to_json(bench.slowdown),
        "neighbour_slowdown": to_json(bench.neighbour_slowdown),
        "conditions": {
            name: to_json(side) | {"per_sec": side.per_sec, "spread": side.spread}
            for name, side in sides.items()
        },
        "hog_gbps": list(result.hog_gbps),
        "proofs": to_json(result.proofs),
        "tuned_for_sm_counts": list(result.tuned_for_sm_counts),
    }


def rounds_json(result: BenchResult) -> list[dict[str, Any]]:
    """Return all repeats of all rounds, trimmed ones too; times from the first round's window."""
    zero = result.rounds[0].window[0]

    def times(rans: Sequence[Repeats]) -> list[dict[str, Any]]:
        return [
            {
                "slice_id": ran.slice_id,
                "calls": ran.calls,
                "start_secs": [round(s - zero, 7) for s in ran.starts],
                "latency_secs": [round(s, 9) for s in ran.secs],
            }
            for ran in rans
        ]

    return [
        {
            "condition": str(each.condition),
            "window_secs": [round(t - zero, 7) for t in each.window],
            "replicas": times(each.replicas),
            "others": times(each.others),
        }
        for each in result.rounds
    ]


def _speeds(bench: Bench, hog_gbps: Sequence[float | None]) -> RenderableType:
    heads = ("", "slice", *(f"p{p}" for p in PERCENTILES), "per second", "samples")
    rows: list[Sequence[Cell]] = []
    for side in (bench.alone, bench.beside):
        if side is not None:
            rows += [_cells(str(side.condition), speed, _rate(speed)) for speed in side.replicas]
            for speed, gbps in itertools.zip_longest(side.others, hog_gbps[: len(side.others)]):
                rate = _rate(speed) if gbps is None else f"{significant(gbps)} GB/s"
                rows.append(_cells("neighbour", speed, rate, style="dim"))
    if bench.neighbour is not None:
        (speed,) = bench.neighbour.others
        rows.append(_cells("it alone", speed, _rate(speed), style="dim"))
    grid = Grid(heads, rows, range(2, len(heads)))
    return terminal.table(grid, least_width=len("neighbour"))


def _rate(speed: Speed) -> str:
    return UNKNOWN if speed.per_sec is None else significant(speed.per_sec)


def _cells(name: str, speed: Speed, rate: str, *, style: str = "") -> tuple[Cell, ...]:
    times = (secs_text(secs) for _, secs in speed.percentiles)
    cells = (name, speed.slice_id, *times, rate, f"{speed.samples:,}")
    return tuple(Cell(cell, style=style) for cell in cells)


def _sentences(bench: Bench) -> list[str]:
    found = []
    if bench.slowdown is not None and bench.beside is not None:
        slow = bench.slowdown
        ratio, interval = ratio_texts(slow.interval)
        found.append(
            f"{ratio}{TIMES} the latency of alone beside neighbours (95% interval {interval}, "
            f"medians of {count_text(bench.beside.rounds, 'round')})"
        )
    if bench.neighbour_slowdown is not None:
        ratio, interval = ratio_texts(bench.neighbour_slowdown.interval)
        found.append(f"{ratio}{TIMES} that of the neighbour alone ({interval}) for the neighbour")
    if bench.beside is not None and len(bench.beside.replicas) > 1:
        total = bench.beside.per_sec
        text = f"{UNKNOWN if total is None else significant(total)} per second in all"
        if bench.beside.spread is not None:
            text += f"; the slowest replica's median is {percent_text(bench.beside.spread)} over"
            text += " the fastest's"
        found.append(text)
    found += _short_of(bench)
    return found


def _short_of(bench: Bench) -> list[str]:
    """Say which percentiles have too few samples."""
    least = min(
        (s.samples for side in (bench.alone, bench.beside) if side for s in side.replicas),
        default=0,
    )
    missing = [p for p in PERCENTILES if least < samples_needed(p)]
    return [
        f"p{p} takes {samples_needed(p)} samples, and {Condition.ALONE} or beside there were "
        f"{least}: give a longer --duration"
        for p in missing
    ]
