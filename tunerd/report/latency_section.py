"""The section of the page about the whole model's latency, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report import svg
from tunerd.report.components import caption, section
from tunerd.report.figures import LATENCY_NAMES, against_onnxruntime, median_of, ordered
from tunerd.report.markup import Markup, element
from tunerd.system.text import (
    count_text,
    is_known,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary.outcome import ONNX_RUNTIME, Comparison, Latency, Outcome
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

_ENDINGS: dict[SpeedVerdict, str] = {
    Verdict.FASTER: "",
    Verdict.SLOWER: ": slower",
    Verdict.SAME: ": no difference of more than 1%",
    Verdict.CANNOT_TELL: ": the samples cannot tell which is faster",
}


def latency_section(outcome: Outcome) -> Markup:
    seen = [(latency, median_of(latency)) for latency in ordered(outcome.latencies)]
    known = [(latency, s) for latency, s in seen if s is not None]
    if not known:
        return section("Before and after", lead="No end-to-end latency was measured.")
    scale = bar_scale(known)
    sides = [(ONNX_RUNTIME, against_onnxruntime(outcome)), ("Default", outcome.end_to_end)]
    said = [_over_tuned(name, compared) for name, compared in sides if compared is not None]
    if outcome.verification.reference != ONNX_RUNTIME:
        said.append("It is not compared with ONNX Runtime: the model is a Relax module.")
    return section(
        "Before and after",
        element("div", *(bar_row(latency, s, scale) for latency, s in known), class_="bars"),
        caption(
            "One inference, end to end. Bars are medians, ticks are samples, brackets hold the "
            "median with 95%. Tuned and default were timed in turns, ONNX Runtime after them on "
            "the same cores."
        ),
        lead=" ".join(said),
    )


def _over_tuned(name: str, compared: Comparison) -> str:
    ratio, interval = ratio_texts(compared.interval)
    return f"{name} over tuned is {ratio}, 95% interval {interval}{_ENDINGS[compared.verdict]}."


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
