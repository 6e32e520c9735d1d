"""A run that came to its end: what `tunerd tune` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.report.disturbance_text import disturbance_json, disturbance_sentences
from tunerd.report.drift_section import drift_json, drift_warnings
from tunerd.report.fidelity_section import fidelity_json, fidelity_text
from tunerd.report.figures import share_words
from tunerd.report.precision_text import precision_json
from tunerd.report.run_view import RunView
from tunerd.report.table import outcome_json, outcome_table
from tunerd.report.time_section import time_json, time_table
from tunerd.stats.ranking import fidelity as fidelity_of
from tunerd.system.text import one_line
from tunerd.vocabulary.outcome import Outcome
from tunerd.vocabulary.verdict import Verdict


def run_json(view: RunView, outcome: Outcome) -> dict[str, Any]:
    """Return a run's outcome, and what it says of its own measuring, for json.dumps."""
    return outcome_json(outcome, share=share_words(view)) | {
        "precision": precision_json(view.settings),
        "time_use": time_json(view.time_use) if view.time_use else None,
        "fidelity": fidelity_json(outcome.tasks),
        "drift": drift_json(view.drift),
        "disturbed": disturbance_json(view.disturbed, outcome.tasks, outcome.disturbed_by),
        "next_try": next_try(outcome, view.settings.get("precision")) or None,
    }


def run_result(view: RunView, outcome: Outcome, *, fidelity: bool) -> RenderableType:
    """Return the same for rich to print; `fidelity`: what was asked to judge the ranking, too."""
    lines: list[RenderableType] = [outcome_table(outcome, share=share_words(view))]
    if view.time_use:
        lines += [Text(""), time_table(view.time_use), Text("")]
    if outcome.verification.verdict is Verdict.CANNOT_TELL:
        why = one_line(outcome.verification.message)
        said = f"it cannot be told whether the tuned model's results are right: {why}"
        lines.append(Text(said, style="yellow"))
    warnings = drift_warnings(view.drift)
    warnings += disturbance_sentences(view.disturbed, outcome.tasks, outcome.disturbed_by)
    lines += [Text(warning, style="yellow") for warning in warnings]
    if fidelity:
        lines.append(Text(fidelity_text(fidelity_of(outcome.tasks))))
    return Group(*lines)


def next_try(outcome: Outcome, precision: str | None) -> str:
    """Say what a person would try next of a run that came to its end so, or nothing."""
    model = outcome.model
    is_single = any(spec.dtype == "float32" for spec in (*model.inputs, *model.outputs))
    if precision is None and is_single and outcome.target.is_cuda:
        return (
            "its kernels compute in fp32, as the model was exported: --precision fp16 uses the "
            "GPU's tensor cores, and is checked against the same outputs"
        )
    return ""
