"""One self-contained HTML page about a run: it opens offline and asks nothing of any server."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tunerd import __version__
from tunerd.drift import SliceDrift
from tunerd.report import HistoryPoint, svg
from tunerd.report.blocks import pairs, section
from tunerd.report.drift_section import drift_section
from tunerd.report.fidelity_section import fidelity_section
from tunerd.report.figures import (
    LATENCY_NAMES,
    Spread,
    headline,
    share_asked,
    spread,
)
from tunerd.report.markup import Child, Markup, element, join, stylesheet
from tunerd.report.run_sections import (
    Failures,
    asked_and_obtained_section,
    correctness_section,
    facts_section,
    failures_section,
    history_section,
    model_section,
    obtained_texts,
)
from tunerd.report.task_section import task_section
from tunerd.report.time_section import where_time_went_section
from tunerd.report.words import (
    count_text,
    duration_text,
    is_known,
    ratio_texts,
    secs_range_text,
    secs_text,
    significant,
)
from tunerd.time_use import TimeUse
from tunerd.vocabulary import Latency, Outcome, Verdict

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(
    path: Path,
    *,
    outcome: Outcome,
    history: Sequence[HistoryPoint],
    time_use: TimeUse | None,
    failures: Failures,
    settings: dict[str, Any],
    host: dict[str, Any],
    drift: Sequence[SliceDrift] = (),
) -> None:
    """Write the page to `path`, in one step: a reader sees the old page or the new one.

    `failures` holds a kind, how often, and the last message of each.
    """
    page = join(
        (
            Markup("<!doctype html>\n"),
            element(
                "html",
                _head(outcome),
                element(
                    "body",
                    _header(outcome, history, settings),
                    element(
                        "main",
                        _before_after(outcome),
                        task_section(outcome),
                        fidelity_section(outcome.tasks),
                        history_section(history),
                        asked_and_obtained_section(outcome, settings),
                        correctness_section(outcome),
                        where_time_went_section(time_use),
                        drift_section(drift),
                        failures_section(failures),
                        facts_section("Settings", settings),
                        facts_section("Host and versions", host),
                        model_section(outcome),
                    ),
                    _footer(),
                ),
                lang="en",
            ),
        )
    )
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)


def _head(outcome: Outcome) -> Markup:
    css = resources.files("tunerd.report").joinpath("page.css").read_text(encoding="utf-8")
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", f"{outcome.model.name}: {headline(outcome).text}"),
        stylesheet(css),
    )


def _header(outcome: Outcome, history: Sequence[HistoryPoint], settings: dict[str, Any]) -> Markup:
    verdict = headline(outcome)
    compared = outcome.end_to_end
    tuned = sum(t.is_tuned for t in outcome.tasks)
    trials = sum(t.trials for t in outcome.tasks)
    where = [share_asked(settings), *obtained_texts(outcome)]
    key_figures: list[tuple[str, Child]] = [
        ("Default", secs_text(compared.base_secs)),
        ("Tuned", secs_text(compared.new_secs)),
        ("Tuned tasks", f"{tuned} of {len(outcome.tasks)}"),
        ("Trials", f"{trials:,}"),
        ("Tuning time", duration_text(history[-1].elapsed_secs if history else None)),
    ]
    return element(
        "header",
        element(
            "p",
            element("bdi", outcome.model.name),
            *(element("span", element("bdi", text)) for text in where),
            class_="eyebrow",
        ),
        element("h1", verdict.claim, " ", element("span", f"{verdict.grounds}.")),
        pairs(key_figures, "figures"),
        class_=verdict.tone,
    )


def _before_after(outcome: Outcome) -> Markup:
    seen = [(latency, spread(latency.run_secs)) for latency in outcome.latencies]
    known = [(latency, s) for latency, s in seen if s is not None]
    if not known:
        return section("Before and after", lead="No end-to-end latency was measured.")
    scale = _bar_scale(known)
    compared = outcome.end_to_end
    ratio, interval = ratio_texts(compared.ratio, compared.ratio_low, compared.ratio_high)
    said = {
        Verdict.FASTER: f"Default over tuned is {ratio}, 95% interval {interval}.",
        Verdict.SLOWER: f"Default over tuned is {ratio}, 95% interval {interval}: slower.",
        Verdict.SAME: f"Default over tuned is {ratio}, 95% interval {interval}: no difference "
        "of more than 1%.",
        Verdict.CANNOT_TELL: f"Default over tuned is {ratio}, 95% interval {interval}: "
        "the samples cannot tell which is faster.",
    }[compared.verdict] + _against_onnxruntime({la.name: s for la, s in known})
    return section(
        "Before and after",
        element("div", *(_bar_row(latency, s, scale) for latency, s in known), class_="bars"),
        element(
            "p",
            "One inference, end to end. Bars are medians, ticks are samples taken in turns, "
            "brackets hold the median with 95%.",
            class_="caption",
        ),
        lead=said,
    )


def _against_onnxruntime(by_name: dict[str, Spread]) -> str:
    if "onnxruntime" not in by_name or "tuned" not in by_name:
        return ""
    tuned_secs = by_name["tuned"].median_secs
    if tuned_secs <= 0:
        return ""
    part = by_name["onnxruntime"].median_secs / tuned_secs
    return f" The median of ONNX Runtime is {significant(part)} times that of the tuned model."


def _bar_scale(known: Sequence[tuple[Latency, Spread]]) -> float:
    """Return the end of the scale: all samples, but no straggler may flatten every bar."""
    slowest = max(s.median_secs for _, s in known)
    highest = max(v for latency, _ in known for v in latency.run_secs if is_known(v))
    return min(highest, 1.3 * slowest) * 1.02 or 1.0


def _bar_row(latency: Latency, seen: Spread, scale_secs: float) -> Markup:
    name = LATENCY_NAMES.get(latency.name, latency.name)
    style = latency.name if latency.name in LATENCY_NAMES else "other"
    interval: tuple[float, float] | None = None
    spoken = count_text(seen.samples, "sample")
    if seen.low_secs is not None and seen.high_secs is not None:
        interval = (seen.low_secs, seen.high_secs)
        spoken = secs_range_text(seen.low_secs, seen.high_secs)
    samples = [s for s in latency.run_secs if is_known(s)]
    return element(
        "div",
        element("span", element("bdi", name), class_="name"),
        svg.sample_bar(
            name, samples, seen.median_secs, interval, scale_secs=scale_secs, style=style
        ),
        element(
            "span",
            element("strong", secs_text(seen.median_secs)),
            element("small", spoken),
            class_="value",
        ),
        class_="bar-row",
    )


def _footer() -> Markup:
    return element(
        "footer",
        element(
            "p",
            "“Faster” is said where the whole 95% interval of the ratio allows it, and “cannot "
            "tell” where the samples do not decide. A task keeps its default schedule unless a "
            "tuned one is faster in that sense. A share caps the SMs or cores; caches, memory "
            "bandwidth and power stay shared.",
        ),
        element("p", f"tunerd {__version__}"),
    )
