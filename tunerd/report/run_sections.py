"""The shorter sections of the page: the search's progress, whether it is right, the model."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.report.components import caption, pairs, section
from tunerd.report.figures import accuracy_text, error_text, weighted_secs
from tunerd.report.markup import Child, Markup
from tunerd.report.plot import history_plot
from tunerd.report.precision_text import precision_sentences
from tunerd.report.run_view import RunView
from tunerd.system.text import (
    TIMES,
    count_text,
    duration_text,
    is_known,
    percent_text,
    secs_text,
)
from tunerd.telemetry.history import HistoryPoint
from tunerd.vocabulary.outcome import Outcome
from tunerd.vocabulary.verdict import Verdict

_MOST_OUTPUTS = 25


def history_section(history: Sequence[HistoryPoint]) -> Markup:
    title = "Best latency over time"
    plot = history_plot(history)
    known = [p for p in history if is_known(p.weighted_best_secs)]
    if plot is None:
        words = "The best did not change." if known else "Not every task got a measurement."
        return section(title, lead=words)
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
    return section(title, plot, caption(about), lead=lead)


def correctness_section(outcome: Outcome) -> Markup:
    verification = outcome.verification
    lead = {
        Verdict.RIGHT: f"The outputs agree with {verification.reference}.",
        Verdict.WRONG: f"The outputs disagree with {verification.reference}.",
        Verdict.CANNOT_TELL: "Cannot tell whether the outputs are right.",
    }[verification.verdict]
    rows: list[tuple[str, Child]] = [
        (f"{verification.inputs.capitalize()}s", f"{verification.seeds}"),
        ("Worst error", error_text(verification)),
        ("Tolerance", f"{verification.atol:g} + {verification.rtol:g} {TIMES} |reference|"),
        *(
            (f"Output {of.output}", accuracy_text(of))
            for of in verification.accuracy[:_MOST_OUTPUTS]
        ),
        ("Remark", verification.message),
    ]
    return section("Correctness", pairs(rows), lead=lead)


def model_section(view: RunView) -> Markup:
    rows: list[tuple[str, Child]] = []
    if view.outcome is not None:
        model = view.outcome.model
        default, best = weighted_secs(view.outcome.tasks)
        rows += [
            *((f"Input {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.inputs),
            *((f"Output {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.outputs),
            ("Hit rate", f"{percent_text(view.outcome.hit_rate)} of the tasks use a tuned record"),
            (
                "Sum of kernels",
                f"{secs_text(default)} with the defaults, {secs_text(best)} as shipped",
            ),
            ("Artifact", view.outcome.artifact),
            *(("Changed on import", note) for note in model.notes),
        ]
    rows += [("Precision", said) for said in precision_sentences(view.settings)]
    rows.append(("Digest", view.facts.model_digest))
    return section("Model", pairs(rows, "pairs facts"))
