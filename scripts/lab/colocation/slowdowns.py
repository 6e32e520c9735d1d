#!/usr/bin/env python3
"""How well the slowdown of one model beside another is estimated, of pairs that are measured here.

    PYTHONPATH=.:scripts python3 -m lab.colocation.slowdowns --out FOLDER \
        resnet50 mobilenet_v2 encoder bert=runs/bert-gpu50/artifact ...

Takes artifacts; a name alone is a model of lab/colocation/tenants.py, tuned at 100% into --runs
where it is not there. Measures each two of them, and each beside itself, at each of --splits (50-50
is half of the device for each), as `tunerd colocate` does, into pairs.jsonl, which a mix and a file
of jobs take under `pairs`. What is there is not measured again; pairs of models have their turn
before further splits, so that a call that --until ends has as many pairs of models as it can. From
20 pairs of 5 pairs of models on it learns from them, each pair of models estimated without itself,
and writes slowdowns.json, slowdowns.txt and slowdowns.svg, the plot of the calibration. With
--estimate-only it measures nothing, and learns from pairs of the device that was measured last.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.colocation import tenants
from lab.colocation.steps import Steps, say, since_start
from lab.colocation.tenants import RUNS, Kind
from lab.lab import made_by, write
from lab.series_style import FONT, SERIES_STYLE
from tunerd.api.colocation import without_mismatches
from tunerd.colocation.plan import Member, Plan
from tunerd.colocation.planning import pairs
from tunerd.colocation.planning.estimates import LEVEL, Calibration, model_of
from tunerd.colocation.planning.features import architecture_of, at_share, features_of
from tunerd.colocation.planning.pairs import PAIRS, Pair, Side
from tunerd.report.calibration import calibration_plot
from tunerd.report.markdown_text import table
from tunerd.report.svg import element, svg_file

MEDIAN_ERROR, COVERAGE = 0.05, LEVEL  # that were aimed at
_LEFT, _RIGHT, _TOP = 56, 24, 48  # pixels around the plot
_WIDTH, _HEIGHT = 400, 320
_STYLE = f"""{SERIES_STYLE}
svg {{ overflow: visible; }}
text {{ font: 12px {FONT}; fill: var(--ink); }}
.title {{ font-weight: 600; font-size: 14px; }}
.tick {{ fill: var(--soft); }}
.axis, .one {{ stroke: var(--soft); }}
.gain {{ stroke: var(--soft); opacity: 0.5; }}
.better {{ fill: var(--series-1); }} .worse {{ fill: var(--series-0); }}
"""
_PAIR_SECS = 30.0  # that one may take
Split = tuple[int, int]


def in_order(names: Sequence[str], splits: Sequence[Split]) -> Iterator[tuple[str, str, Split]]:
    """Yield who is to run beside whom at which shares: each two models once, then once more."""
    both = list(dict.fromkeys([*splits, *((second, first) for first, second in splits)]))
    for turn in range(len(both)):
        for number, (one, two) in enumerate(itertools.combinations_with_replacement(names, 2)):
            split = both[(turn + number) % len(both)]
            if one != two or split[0] >= split[1]:  # beside itself both orders are one
                yield one, two, split


def sides_of(models: Mapping[str, Path], share: int) -> dict[str, Side]:
    """Return what the models are at a share."""
    return {
        name: Side(name, architecture_of(path), share, at_share(features_of(path).named(), share))
        for name, path in models.items()
    }


def measured(
    models: Mapping[str, Path], options: argparse.Namespace, steps: Steps, device: str
) -> None:
    """Measure what is not in the folder yet, as far as there is time."""
    path = options.out / PAIRS
    sides = {share: sides_of(models, share) for share in {s for x in options.splits for s in x}}
    known = {(pair.of.key, pair.beside.key) for pair in pairs.read_pairs(path)}
    for one, two, split in in_order(list(models), options.splits):
        first, second = sides[split[0]][one], sides[split[1]][two]
        if (first.key, second.key) in known:
            continue
        if steps.is_late:
            break
        what = f"{one} at {split[0]}% beside {two} at {split[1]}%"
        with steps.step(what):
            steps.left_secs(_PAIR_SECS, keep=_PAIR_SECS)
            like = Plan(device=options.device, members=(Member(name="one", artifact=models[one]),))
            found = pairs.measure(
                (first, [models[one]]),
                (second, [models[two]]),
                like=like,
                device=device,
                say=lambda _: None,
                rounds=options.rounds,
                round_secs=options.round_secs,
            )
            pairs.append(path, found)
            say(f"{what}: {found[0].slowdown.value:.3f}, and {found[1].slowdown.value:.3f}")


def tables(found: Sequence[Pair], calibration: Calibration | None, why: str) -> str:
    """Return Markdown: each pair, measured and estimated, and what was aimed at."""
    estimates = {} if calibration is None else {id(c.pair): c for c in calibration.checked}
    rows = []
    for pair in sorted(found, key=lambda each: each.slowdown.value):
        checked = estimates.get(id(pair))
        said = "-"
        if checked is not None:
            said = f"{checked.estimate.value:.3f} ({checked.estimate.low:.3f} to "
            said += f"{checked.estimate.high:.3f})"
        rows.append([
            f"{pair.of.name} at {pair.of.share}%", f"{pair.beside.name} at {pair.beside.share}%",
            f"{pair.slowdown.value:.3f}", said,
            "-" if checked is None else f"{checked.error:.1%}",
        ])  # fmt: skip
    heads = ("model", "beside", "slowdown", f"estimated, with {LEVEL:.0%}", "off")
    lines = [table(heads, rows, numbers=range(2, 5)), ""]
    if calibration is None:
        return "\n".join([*lines, f"no estimate: {why}"]) + "\n"
    error, coverage = calibration.median_error, calibration.coverage
    lines += [
        f"- median error {error:.1%}, at most {MEDIAN_ERROR:.0%}: "
        f"{'yes' if error <= MEDIAN_ERROR else 'no'}; always the median of the others: "
        f"{calibration.median_error_of_constant:.1%}",
        f"- of {len(calibration.checked)} pairs {coverage:.0%} lie in their intervals, at least "
        f"{COVERAGE:.0%}: {'yes' if coverage >= COVERAGE else 'no'}",
    ]
    return "\n".join(lines) + "\n"


def report(out: Path, document: dict[str, Any], device: str) -> str:
    """Learn from the pairs of a folder, write what came of it, and return the tables."""
    found = [pair for pair in pairs.read_pairs(out / PAIRS) if pair.device == device]
    model, why = model_of(found)
    calibration = None if model is None else model.calibration
    shown = tables(found, calibration, why)
    (out / "slowdowns.txt").write_text(shown)
    if calibration is not None:
        document |= {
            "median_error": calibration.median_error,
            "median_error_of_constant": calibration.median_error_of_constant,
            "coverage": calibration.coverage,
            "pairs": len(calibration.checked),
        }
        (out / "slowdowns.svg").write_text(calibration_svg(calibration, device) + "\n")
    write(out / "slowdowns.json", document)
    return shown


def calibration_svg(calibration: Calibration, device: str) -> str:
    """Return the plot as a picture of its own: measured slowdowns across, estimates up."""
    title = f"Estimated over measured slowdown, {len(calibration.checked)} pairs, {device}"
    plot = element(
        "svg", calibration_plot(calibration), x=_LEFT, y=_TOP, width=_WIDTH, height=_HEIGHT,
    )  # fmt: skip
    return svg_file(title, _STYLE, _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT, plot)


def _device(options: argparse.Namespace) -> str:
    from tunerd.system import host

    if options.estimate_only and (found := pairs.read_pairs(options.out / PAIRS)):
        return found[-1].device
    facts = host.facts()
    return facts.gpus[0].name if options.device == "cuda" and facts.gpus else facts.cpu_model


def _models(options: argparse.Namespace, steps: Steps) -> dict[str, Path]:
    found = {}
    for given in options.models:
        name, _, path = given.partition("=")
        if path:
            found[name] = Path(path).resolve()
            continue
        with steps.step(f"making {name}"):
            steps.left_secs(0.0)
            (found[name],), _ = tenants.made(
                Kind(name, 100), 1, options.runs, budget=options.budget
            )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="NAME[=ARTIFACT]")
    parser.add_argument("--splits", default="50-50,25-75", help="shares of the two of a pair")
    parser.add_argument("--rounds", type=int, default=pairs.ROUNDS, help="of a pair")
    parser.add_argument("--round-secs", type=float, default=pairs.ROUND_SECS)
    parser.add_argument("--prepare-only", action="store_true", help="make the artifacts")
    parser.add_argument("--estimate-only", action="store_true", help="measure nothing")
    parser.add_argument("--budget", default="30s", help="of each search")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="seconds, after which nothing is begun"
    )
    parser.add_argument("--runs", type=Path, default=RUNS, help="for models and artifacts")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", help="or cpu")
    options = parser.parse_args(argv)
    options.splits = [
        (int(first), int(second))
        for first, _, second in (each.partition("-") for each in options.splits.split(","))
    ]
    options.out, options.runs = options.out.resolve(), options.runs.resolve()
    since_start()
    options.out.mkdir(parents=True, exist_ok=True)
    device = _device(options)
    document: dict[str, Any] = {**made_by(), "device": device}
    steps = Steps(document, lambda: write(options.out / "slowdowns.json", document), options.until)
    models = {} if options.estimate_only else _models(options, steps)
    if not options.prepare_only:
        with without_mismatches():
            measured(models, options, steps, device)
    print(report(options.out, document, device), end="")


if __name__ == "__main__":
    main()
