"""What `tunerd bench` found, on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tunerd.studies.bench.bench import PERCENTILES, Bench, Condition, Side, samples_needed
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


def bench_table(title: str, bench: Bench, hog_gbps: Sequence[float | None] = ()) -> RenderableType:
    """Return a line per slice and condition, the slow-down and the spread, for rich to print."""
    lines: list[RenderableType] = [Text(one_line(title), style="bold"), _speeds(bench, hog_gbps)]
    lines += [Text(sentence) for sentence in _sentences(bench)]
    return Group(*lines)


def _speeds(bench: Bench, hog_gbps: Sequence[float | None]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("slice", overflow="fold")
    for heading in (*(f"p{p}" for p in PERCENTILES), "per second", "samples"):
        table.add_column(heading, justify="right", no_wrap=True)
    for side in (bench.alone, bench.beside):
        if side is not None:
            _add(table, side, hog_gbps)
    return table


def _add(table: Table, side: Side, hog_gbps: Sequence[float | None]) -> None:
    for speed in side.replicas:
        table.add_row(
            Text(str(side.condition)),
            Text(speed.slice_id),
            *(Text(secs_text(secs)) for _, secs in speed.percentiles),
            Text(UNKNOWN if speed.per_sec is None else significant(speed.per_sec)),
            Text(f"{speed.samples:,}"),
        )
    for number, speed in enumerate(side.others):
        gbps = hog_gbps[number] if number < len(hog_gbps) else None
        rate = UNKNOWN if speed.per_sec is None else significant(speed.per_sec)
        table.add_row(
            Text("neighbour", style="dim"),
            Text(speed.slice_id, style="dim"),
            *(Text(secs_text(secs), style="dim") for _, secs in speed.percentiles),
            Text(f"{significant(gbps)} GB/s" if gbps is not None else rate, style="dim"),
            Text(f"{speed.samples:,}", style="dim"),
        )


def _sentences(bench: Bench) -> list[str]:
    found = []
    if bench.slowdown is not None and bench.beside is not None:
        slow = bench.slowdown
        ratio, interval = ratio_texts(slow.ratio, slow.ratio_low, slow.ratio_high)
        found.append(
            f"{ratio}{TIMES} the latency of alone beside neighbours (95% interval {interval}, "
            f"medians of {count_text(bench.beside.rounds, 'round')})"
        )
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
