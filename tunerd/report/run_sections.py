"""The sections of the page below the tasks: how the result came about, and on what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunerd.report import HistoryPoint, svg
from tunerd.report.blocks import pairs, section, table
from tunerd.report.figures import error_text, share_asked, weighted_secs
from tunerd.report.markup import Child, Markup, element
from tunerd.report.words import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    is_known,
    percent_text,
    secs_text,
)
from tunerd.vocabulary import CapProof, Correctness, Outcome

Failures = Sequence[tuple[str, int, str]]


def history_section(history: Sequence[HistoryPoint]) -> Markup:
    title = "Best latency over time"
    plot = svg.history_plot(history)
    known = [p for p in history if is_known(p.weighted_best_secs)]
    if plot is None:
        words = "The best did not change." if known else "No task set got a complete measurement."
        return section(title, lead=words)
    first, last = known[0], known[-1]
    lead = (
        f"The tasks' best medians times their calls: {secs_text(first.weighted_best_secs)} after "
        f"{duration_text(first.elapsed_secs)}, {secs_text(last.weighted_best_secs)} after "
        f"{duration_text(last.elapsed_secs)} and {count_text(last.trials, 'trial')}."
    )
    caption = "Search measurements, time on a logarithmic axis. Point at the line for values."
    return section(title, plot, element("p", caption, class_="caption"), lead=lead)


def _unit(outcome: Outcome) -> str:
    return "SMs" if outcome.target.is_cuda else "cores"


def obtained_texts(outcome: Outcome) -> list[str]:
    """Return `52 of 132 SMs, NVIDIA H200` for each distinct share and device obtained."""
    unit = _unit(outcome)
    return sorted(
        {f"{p.sm_count} of {p.device_sm_count} {unit}, {p.device}" for p in outcome.proofs}
    )


def asked_and_obtained_section(outcome: Outcome, settings: dict[str, Any]) -> Markup:
    asked = f"Asked: {share_asked(settings)}."
    if not outcome.proofs:
        return section("Asked and obtained", lead=f"{asked} No slice has proved its cap.")
    heads = ("Slice", "Obtained", "Mechanism", "Device", "Driver")
    rows = [
        element("tr", *(
            element("td", cell, data_label=head)
            for head, cell in zip(heads, _proof_cells(proof, _unit(outcome)), strict=True)
        ))
        for proof in outcome.proofs
    ]  # fmt: skip
    lead = f"{asked} Each slice read what it obtained inside its client before measuring."
    return section("Asked and obtained", table(heads, rows, "proofs"), lead=lead)


def _proof_cells(proof: CapProof, unit: str) -> tuple[Child, ...]:
    whole = proof.device_sm_count
    part = f" ({percent_text(proof.sm_count / whole)})" if whole else ""
    attached = "" if proof.attached else ", not attached"
    return (
        element("code", proof.slice_id),
        f"{proof.sm_count} of {whole} {unit}{part}",
        f"{proof.mechanism}{attached}",
        element("bdi", proof.device),
        proof.driver or UNKNOWN,
    )


def correctness_section(outcome: Outcome) -> Markup:
    verification = outcome.verification
    lead = {
        Correctness.RIGHT: "The outputs agree with ONNX Runtime.",
        Correctness.WRONG: "The outputs disagree with ONNX Runtime.",
        Correctness.CANNOT_TELL: "Cannot tell whether the outputs are right.",
    }[verification.verdict]
    rows: list[tuple[str, Child]] = [
        ("Seeds", f"{verification.seeds}"),
        ("Worst error", error_text(verification)),
        ("Tolerance", f"{verification.atol:g} + {verification.rtol:g} {TIMES} |reference|"),
        ("Remark", verification.message),
    ]
    return section("Correctness", pairs(rows), lead=lead)


def failures_section(failures: Failures) -> Markup:
    if not failures:
        return section("Failed trials", lead="None.")
    heads = ("Kind", "Trials", "Last message")
    rows = [
        element(
            "tr",
            element("td", kind, data_label=heads[0]),
            element("td", f"{count:,}", data_label=heads[1]),
            element("td", element("pre", message or UNKNOWN), data_label=heads[2]),
        )
        for kind, count, message in failures
    ]
    lead = f"{count_text(sum(count for _, count, _ in failures), 'trial')} ended without a number."
    return section("Failed trials", table(heads, rows, "failures"), lead=lead)


def facts_section(title: str, values: Mapping[str, Any]) -> Markup:
    rows: list[tuple[str, Child]] = [(name, value) for name, value in _flat(values)]
    if not rows:
        return section(title, lead="Not recorded.")
    return element("section", element("h2", title), pairs(rows, "pairs facts"))


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return dotted names and values of nested dicts; a list of plain values is one value."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in _flat(v, f"{name}.{k}" if name else str(k))]
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            return [p for i, item in enumerate(value) for p in _flat(item, f"{name}.{i}")]
        return [(name, ", ".join(map(str, value)))]
    return [(name, UNKNOWN if value is None else str(value))]


def model_section(outcome: Outcome) -> Markup:
    model = outcome.model
    default, best = weighted_secs(outcome.tasks)
    rows: list[tuple[str, Child]] = [
        *((f"Input {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.inputs),
        *((f"Output {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.outputs),
        ("Digest", model.digest),
        ("Hit rate", f"{percent_text(outcome.hit_rate)} of the tasks use a tuned record"),
        ("Sum of kernels", f"{secs_text(default)} with the defaults, {secs_text(best)} as shipped"),
        ("Artifact", outcome.artifact),
        *(("Changed on import", note) for note in model.notes),
    ]
    return element("section", element("h2", "Model"), pairs(rows, "pairs facts"))
