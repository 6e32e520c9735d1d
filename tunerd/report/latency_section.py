"""The section of the page about the whole model's latency, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report import svg
from tunerd.report.components import caption, section
from tunerd.report.figures import LATENCY_NAMES, median_of
from tunerd.report.markup import Markup, element
from tunerd.system.text import (
    count_text,
    is_known,
    ratio_texts,
    secs_range_text,
    secs_text,
    significant,
)
from tunerd.vocabulary.outcome import ONNX_RUNTIME, Latency, Outcome
from tunerd.vocabulary.verdict import Interval, Verdict


def latency_section(outcome: Outcome) -> Markup:
    seen = [(latency, median_of(latency)) for latency in outcome.latencies]
    known = [(latency, s) for latency, s in seen if s is not None]
    if not known:
        return section("Before and after", lead="No end-to-end latency was measured.")
    scale = bar_scale(known)
    compared = outcome.end_to_end
    ratio, interval = ratio_texts(compared.interval)
    said = {
        Verdict.FASTER: f"Default over tuned is {ratio}, 95% interval {interval}.",
        Verdict.SLOWER: f"Default over tuned is {ratio}, 95% interval {interval}: slower.",
        Verdict.SAME: f"Default over tuned is {ratio}, 95% interval {interval}: no difference "
        "of more than 1%.",
        Verdict.CANNOT_TELL: f"Default over tuned is {ratio}, 95% interval {interval}: "
        "the samples cannot tell which is faster.",
    }[compared.verdict] + _against_onnxruntime(outcome, {la.name: s for la, s in known})
    return section(
        "Before and after",
        element("div", *(bar_row(latency, s, scale) for latency, s in known), class_="bars"),
        caption(
            "One inference, end to end. Bars are medians, ticks are samples taken in turns, "
            "brackets hold the median with 95%."
        ),
        lead=said,
    )


def _against_onnxruntime(outcome: Outcome, by_name: dict[str, Interval]) -> str:
    if outcome.verification.reference != ONNX_RUNTIME:
        return " It is not compared with ONNX Runtime: the model is a Relax module."
    if "onnxruntime" not in by_name or "tuned" not in by_name:
        return ""
    tuned_secs = by_name["tuned"].value
    if tuned_secs <= 0:
        return ""
    part = by_name["onnxruntime"].value / tuned_secs
    return f" The median of ONNX Runtime is {significant(part)} times that of the tuned model."


def bar_scale(known: Sequence[tuple[Latency, Interval]]) -> float:
    """Return the end of the scale: all samples, but no straggler may flatten every bar."""
    slowest = max(s.value for _, s in known)
    highest = max(v for latency, _ in known for v in latency.run_secs if is_known(v))
    return min(highest, 1.3 * slowest) * 1.02 or 1.0


def bar_row(latency: Latency, seen: Interval, scale_secs: float) -> Markup:
    name = LATENCY_NAMES.get(latency.name, latency.name)
    style = latency.name if latency.name in LATENCY_NAMES else "other"
    samples = [s for s in latency.run_secs if is_known(s)]
    spoken = count_text(len(samples), "sample")
    if is_known(seen.high):
        spoken = secs_range_text(seen.low, seen.high)
    return element(
        "div",
        element("span", element("bdi", name), class_="name"),
        svg.sample_bar(name, samples, seen, scale_secs=scale_secs, style=style),
        element(
            "span",
            element("strong", secs_text(seen.value)),
            element("small", spoken),
            class_="value",
        ),
        class_="bar-row",
    )
