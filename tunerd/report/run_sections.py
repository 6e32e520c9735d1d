"""The sections about a run's result: how fast it is, how it was found, and whether it is right."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report import svg
from tunerd.report.figures import (
    LATENCY_NAMES,
    accuracy_text,
    error_text,
    median_of,
    ordered,
    rivals,
)
from tunerd.report.plot import history_plot
from tunerd.report.run_view import RunView
from tunerd.report.view import Bar, Bars, Cell, Grid, Items, Pairs, Plot, Section, caption
from tunerd.system.text import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    is_known,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary.outcome import (
    BY_ONNX_RUNTIME,
    ONNX_RUNTIME,
    TUNED_BESIDE_ONNX_RUNTIME,
    Comparison,
    Latency,
    Outcome,
)
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

_MOST_OUTPUTS = 25
_LAST_LINES = 6  # of a message; the whole is in the run folder's log
_ENDINGS: dict[SpeedVerdict, str] = {
    Verdict.FASTER: "",
    Verdict.SLOWER: ": slower",
    Verdict.SAME: ": no difference of more than 1%",
    Verdict.CANNOT_TELL: ": the samples cannot tell which is faster",
}
_STYLED = ("tuned", "default", BY_ONNX_RUNTIME)  # latencies with a colour of their own


# --- before and after --------------------------------------------------------------------------


def latency_section(outcome: Outcome | None) -> Section:
    title = "Before and after"
    if outcome is None:
        return Section(title, lead="The run did not come to compile and time the whole model.")
    bars = latency_bars(outcome.latencies)
    if bars is None:
        return Section(title, lead="No end-to-end latency was measured.")
    beside = rivals(outcome)
    names = [rival.name for rival in beside]
    said = [_over_tuned(rival.name, rival.compared) for rival in beside]
    said.append(_over_tuned("Default", outcome.end_to_end))
    about = (
        "One inference, end to end. Bars are medians, ticks are samples, brackets hold the median "
        "with 95%. Tuned and default were timed in turns"
    )
    if ONNX_RUNTIME in names:
        is_beside = any(la.name == TUNED_BESIDE_ONNX_RUNTIME for la in outcome.latencies)
        turns = " in turns with the tuned model once more" if is_beside else " after them"
        about += f", ONNX Runtime{turns} on the same cores"
    if any(name != ONNX_RUNTIME for name in names):
        about += ", PyTorch at the end, in turns with the tuned model once more"
    if not beside:
        is_onnx = outcome.verification.reference == ONNX_RUNTIME
        said.append(
            "Nothing but the default schedules was timed beside it."
            if is_onnx
            else "It is not compared with ONNX Runtime: the model is a Relax module."
        )
    remarks = Items(outcome.remarks) if outcome.remarks else None
    return Section(title, (bars, caption(f"{about}."), remarks), lead=" ".join(said))


def _over_tuned(name: str, compared: Comparison) -> str:
    ratio, interval = ratio_texts(compared.interval)
    return f"{name} over tuned is {ratio}, 95% interval {interval}{_ENDINGS[compared.verdict]}."


def latency_bars(
    latencies: Sequence[Latency], *, title: str = "", beside: Sequence[Latency] = ()
) -> Bars | None:
    """Return a bar for each latency that is known, on one scale with `beside`; None for none."""
    known = [(la, s) for la in ordered(latencies) if (s := median_of(la)) is not None]
    if not known:
        return None
    medians = [s.value for la in (*latencies, *beside) if (s := median_of(la)) is not None]
    highest = max(v for la in (*latencies, *beside) for v in la.run_secs if is_known(v))
    # All samples, but no straggler may flatten every bar.
    scale = min(highest, 1.3 * max(medians)) * 1.02 or 1.0
    return Bars([_bar(latency, seen, scale) for latency, seen in known], title)


def _bar(latency: Latency, seen: Interval, scale_secs: float) -> Bar:
    name = LATENCY_NAMES.get(latency.name, latency.name)
    style = latency.name if latency.name in _STYLED else "other"
    samples = [s for s in latency.run_secs if is_known(s)]
    bounded = is_known(seen.high)
    spoken = secs_range_text(seen.low, seen.high) if bounded else count_text(len(samples), "sample")
    drawn = svg.sample_bar(name, samples, seen, scale_secs=scale_secs, style=style)
    return Bar(name, drawn, secs_text(seen.value), spoken)


# --- the search, its failures, and whether the result is right ---------------------------------


def history_section(view: RunView) -> Section:
    title, history = "Best latency over time", view.history
    plot = history_plot(history)
    known = [p for p in history if is_known(p.weighted_best_secs)]
    if plot is None:
        words = "The best did not change." if known else "Not every task got a measurement."
        return Section(title, lead=words)
    first, last = known[0], known[-1]
    lead = (
        f"The tasks' best medians times their calls: {secs_text(first.weighted_best_secs)} after "
        f"{duration_text(first.elapsed_secs)}, {secs_text(last.weighted_best_secs)} after "
        f"{duration_text(last.elapsed_secs)} and {count_text(last.trials, 'trial')}."
    )
    about = (
        "From measurements of the search, which are noisier than the finalists'. Pauses between "
        "sessions are left out."
    )
    return Section(title, (Plot(plot), caption(about)), lead)


def correctness_section(outcome: Outcome | None) -> Section | None:
    if outcome is None:
        return None
    verification = outcome.verification
    lead = {
        Verdict.RIGHT: f"The outputs agree with {verification.reference}.",
        Verdict.WRONG: f"The outputs disagree with {verification.reference}.",
        Verdict.CANNOT_TELL: "Cannot tell whether the outputs are right.",
    }[verification.verdict]
    accuracy = verification.accuracy[:_MOST_OUTPUTS]
    rows = [
        (f"{verification.inputs.capitalize()}s", f"{verification.seeds}"),
        ("Worst error", error_text(verification)),
        ("Tolerance", f"{verification.atol:g} + {verification.rtol:g} {TIMES} |reference|"),
        *((f"Output {of.output}", accuracy_text(of)) for of in accuracy),
        ("Remark", verification.message),
    ]
    return Section("Correctness", [Pairs(rows)], lead)


def failure_section(view: RunView) -> Section:
    """Return how often trials failed in which way, and the last lines of the last of each."""
    title, again = "Failed trials", ""
    if view.repeated:
        verb = "was" if view.repeated == 1 else "were"
        again = (
            f" {count_text(view.repeated, 'attempt')} ended through no fault of the candidate, "
            f"and {verb} repeated."
        )
    if not view.failures:
        return Section(title, lead=f"None.{again}")
    rows = [
        (
            kind.name,
            f"{kind.trials:,}",
            Cell(
                last_lines(kind.message) or UNKNOWN,
                f"logs/trial-{kind.trial_id}.log",
                is_message=True,
            ),
        )
        for kind in view.failures
    ]
    failed = sum(kind.trials for kind in view.failures)
    of = f" ({percent_text(view.failed / view.trials)} of the search)" if view.trials else ""
    lead = f"{count_text(failed, 'trial')} ended without a number{of}.{again}"
    heads = ("Kind", "Trials", "Last message")
    return Section(title, [Grid(heads, rows, class_="failures")], lead)


def last_lines(message: str, most: int = _LAST_LINES) -> str:
    """Return the last lines of a message that say anything."""
    return "\n".join([line for line in message.splitlines() if line.strip()][-most:])
