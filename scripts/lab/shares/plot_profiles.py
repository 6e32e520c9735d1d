#!/usr/bin/env python3
"""Draw what profiles have measured.

    scripts/lab/shares/plot_profiles.py results/h200-profiles --out profiles.svg

Reads the samples of each folder below the given one, in order, and prints tables of them: as much
as there is of a profile that was stopped, in whole rounds. The first has latencies. The second has
inputs per second of one client that waits for each answer; where the knee is not sure, at the
smallest share that is known to do. The third has the whole device's median in each round: every
other share is compared with it, so that what disturbs it widens all intervals.
"""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import table
from lab.shares.share_plot import Panel, knee_text, shares_svg
from tunerd.studies.profile.curve import Curve, Point, Visit, curves, knee, whole_rounds
from tunerd.studies.profile.folder import SAMPLES, samples_of
from tunerd.system.text import ratio_texts, secs_text, significant

HEADS = ("model", "batch", "rounds", "whole device", "knee")
RATES = ("model", "batch", "inputs per second on the whole device", "at the knee")
ROUNDS = ("model", "batch", "whole device by round", "slowest over the median of the others")


@dataclass(frozen=True)
class Profile:
    panel: Panel
    visits: Sequence[Visit]  # of whole rounds


def profile(path: Path, loss: float) -> Profile:
    content = path.read_bytes()
    samples = samples_of(lzma.decompress(content) if path.suffix == ".xz" else content, path)
    rounds = whole_rounds(samples.visits)
    if not rounds:
        sys.exit(f"{path} has no whole round")
    shares = [(pct, proof.sm_count) for pct, proof in samples.proofs.items()]
    visits = [v for v in samples.visits if v.round <= rounds]
    found = curves(visits, shares)
    panel = Panel(path.parent.name, found, tuple(knee(curve, loss) for curve in found))
    return Profile(panel, visits)


def rows(each: Panel, shares: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    for curve, answer in zip(each.curves, each.knees, strict=True):
        yield (
            each.name,
            f"{curve.batch}",
            f"{curve.full.rounds}",
            secs_text(curve.full.latency.value),
            knee_text(answer),
            *(slowdown_text(point_at(curve, pct)) for pct in shares),
        )


def rate_rows(each: Panel, shares: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    for curve, answer in zip(each.curves, each.knees, strict=True):
        knee_rate = f"{rate_text(answer.safe)} at {answer.safe.pct}%" if answer.safe else ""
        rates = (rate_text(point_at(curve, pct)) for pct in shares)
        yield each.name, f"{curve.batch}", rate_text(curve.full), knee_rate, *rates


def round_rows(each: Profile) -> Iterator[tuple[str, ...]]:
    for curve in each.panel.curves:
        secs = {
            v.round: median(v.run_secs)
            for v in each.visits
            if (v.batch, v.sm_count) == (curve.batch, curve.full.sm_count)
        }
        slowest = max(secs, key=lambda number: secs[number])
        others = [of for number, of in secs.items() if number != slowest]
        over = (
            f"{100 * (secs[slowest] / median(others) - 1):.1f}%, round {slowest}" if others else ""
        )
        by_round = ", ".join(secs_text(secs[number]) for number in sorted(secs))
        yield each.panel.name, f"{curve.batch}", by_round, over


def point_at(curve: Curve, pct: int) -> Point | None:
    return next((point for point in curve.points if pct in point.pcts), None)


def slowdown_text(point: Point | None) -> str:
    if point is None:
        return ""
    slowdown = point.slowdown
    value, interval = ratio_texts(slowdown)
    return f"{value} ({interval})"


def rate_text(point: Point | None) -> str:
    return significant(point.per_sec) if point else ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--title", default="What a share of the device costs")
    parser.add_argument("--loss", type=float, default=10.0, help="of the knee, in percent")
    parser.add_argument("--shares", default="10,20,40,60,80", help="in the table")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    paths = sorted(options.folder.glob(f"*/{SAMPLES}*"))
    if not paths:
        parser.error(f"{options.folder} has no folder with {SAMPLES}")
    shares = tuple(int(pct) for pct in options.shares.split(","))
    profiles = [profile(path, options.loss / 100) for path in paths]
    panels = [each.panel for each in profiles]
    options.out.write_text(shares_svg(options.title, panels))
    at_shares = tuple(f"at {pct}%" for pct in shares)
    print(table((*HEADS, *at_shares), (row for each in panels for row in rows(each, shares))))
    print()
    print(table((*RATES, *at_shares), (r for each in panels for r in rate_rows(each, shares))))
    print()
    print(table(ROUNDS, (row for each in profiles for row in round_rows(each))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
