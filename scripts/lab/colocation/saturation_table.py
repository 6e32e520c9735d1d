"""The table of a saturation.json: rates, ratios with intervals, and what brings how much."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.colocation.figures import best, p99_ms, ratio, ratio_text

TARGET = 1.5  # times the best of PyTorch's ways to run different models
FIRST = "PyTorch, one after another"
PROCESSES, OVER_PROCESSES = "PyTorch, 8 processes without MPS", 6.0  # which take turns
IN_A_LAUNCH = {"encoder": 1.5}  # times the best way to run them apart, and of others
_OTHERS_IN_A_LAUNCH = 1.2
_APART = (" streams", " in MPS", " green contexts")


def samples_of(document: Mapping[str, Any], mode: str) -> dict[str, list[float]]:
    """Return the rates of each way in the turns that have that mode.

    A way that failed in one of them is left out: it has no pair there.
    """
    turns = [turn for turn in _turns(document) if any(mode in each for each in turn.values())]
    labels = [label for label in turns[0] if all(label in turn for turn in turns)] if turns else []
    return {label: [turn[label][mode]["per_sec"] for turn in turns] for label in labels}


def _turns(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the samples of each turn; before there is one, those that were taken at first."""
    turns = [turn["samples"] for turn in document["turns"]]
    return turns or [found for found in [document.get("first")] if found]


def latencies_of(document: Mapping[str, Any], label: str) -> list[int]:
    """Return the microseconds of all closed samples of a way."""
    turns = [turn.get(label, {}).get("closed", {}) for turn in _turns(document)]
    return [us for turn in turns for us in turn.get("latencies_us", ())]


def joules_of(document: Mapping[str, Any], label: str) -> float | None:
    """Return the joules of an inference, of the whole GPU; None where they were not measured."""
    found = [turn[label]["power"] for turn in _turns(document) if "power" in turn.get(label, {})]
    known = [each for each in found if each["watts"] is not None]
    return statistics.median(e["watts"] / e["per_sec"] for e in known) if known else None


def rivals(labels: Sequence[str]) -> list[str]:
    """Return PyTorch's ways to run different models: not batches of one."""
    return [x for x in labels if x.startswith("PyTorch") and not is_batched(x)]


def is_batched(label: str) -> bool:
    """Return whether a way runs more requests of one model: "batch norms folded" does not."""
    return label.endswith(" of one model")


def table(document: Mapping[str, Any]) -> str:
    """Return Markdown: each way's rate, over one after another and over the best of PyTorch."""
    rates = samples_of(document, "saturated")
    if not rates:
        return "nothing was sampled\n" + _problems(document)
    closed = samples_of(document, "closed")
    known = rivals(list(rates))
    strongest = best(rates, known) if known else None
    if not document["turns"]:
        turns = "one sample of each way, before the first turn"
    else:
        turns = f"{len(document['turns'])} turns"
    joules = {label: joules_of(document, label) for label in rates}
    has_joules = any(each is not None for each in joules.values())  # earlier runs have none
    lines = [
        f"{document['tenants']} x {document['model']}, {document['precision']}, "
        f"{document.get('device', 'no GPU')}, {turns}; the best of PyTorch "
        f"with different models is '{strongest}'",
        "",
        "| inferences/s | saturated | over one after another | over the best of PyTorch | "
        f"one in flight each | p99, ms |{' J an inference |' if has_joules else ''}",
        f"|---|--:|--:|--:|--:|--:|{'--:|' if has_joules else ''}",
    ]
    for label, values in sorted(rates.items(), key=lambda each: statistics.median(each[1])):
        tail = p99_ms(latencies_of(document, label))
        cells = [
            label,
            f"{statistics.median(values):,.0f}",
            *(
                ratio_text(ratio(values, rates[x])) if x in rates else "-"
                for x in (FIRST, strongest)
            ),
            f"{statistics.median(closed[label]):,.0f}" if label in closed else "-",
            "-" if tail is None else f"{tail:.3g}",
            *(["-" if joules[label] is None else f"{joules[label]:.3g}"] if has_joules else []),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(_answers(rates, strongest) if strongest else [])]
    lines += _parts_of(rates, document["tenants"])
    lines += _of_launches(rates, IN_A_LAUNCH.get(document["model"], _OTHERS_IN_A_LAUNCH))
    lines += [
        f"- memory of the GPU that each process took, {where}: {used / (1 << 20):,.0f} MiB"
        for where, used in document.get("used_bytes", {}).items()
    ]
    return "\n".join(lines) + "\n" + _problems(document)


def _answers(rates: Mapping[str, Sequence[float]], strongest: str) -> list[str]:
    ours = [x for x in rates if not x.startswith("PyTorch")]
    if not ours:
        return []
    winner = best(rates, ours)
    engines = [x for x in ours if x.startswith("engine")]
    eager = best(rates, [x for x in rivals(list(rates)) if "compiled" not in x])
    said = []
    for label in dict.fromkeys([winner, *([best(rates, engines)] if engines else [])]):
        said += [_over(rates, label, rival, TARGET) for rival in dict.fromkeys([strongest, eager])]
    if PROCESSES in rates:
        said.append(_over(rates, winner, PROCESSES, OVER_PROCESSES))
    return said


def _parts_of(rates: Mapping[str, Sequence[float]], tenants: int) -> list[str]:
    """Say what kernels and a launch of all bring, and what the engine keeps of it.

    Multiplied, that is about what the engine does over PyTorch on as many streams. Kernels are
    compared in the same way of running, a stream for each model, and the engine with these graphs
    by themselves: in a launch of all, or on streams where there is none.
    """
    plain, launch = f"PyTorch, {tenants} streams", f"{tenants} together"
    tuned = [x for x in rates if x.startswith("tuned") and x.endswith(f", {tenants} streams")]
    if plain not in rates or not tuned:
        return []
    steps = [
        ("tuned kernels bring", tuned),
        (f"a launch of {tenants} brings", [x for x in rates if x.startswith(launch)]),
        ("the engine keeps", [x for x in rates if x.startswith("engine")]),
    ]
    found = [("", plain), *((what, best(rates, labels)) for what, labels in steps if labels)]
    return [
        f"- {what} {ratio_text(ratio(rates[label], rates[before]))}: '{label}' over '{before}'"
        for (_, before), (what, label) in itertools.pairwise(found)
    ]


def _of_launches(rates: Mapping[str, Sequence[float]], aim: float) -> list[str]:
    """Say what launches of several models bring over the best way to run them apart."""
    launched = [x for x in rates if " together" in x]
    apart = [x for x in rates if x not in launched and any(way in x for way in _APART)]
    if not launched or not apart:
        return []
    return [_over(rates, best(rates, launched), best(rates, apart), aim)]


def _over(rates: Mapping[str, Sequence[float]], label: str, rival: str, aim: float) -> str:
    gain = ratio(rates[label], rates[rival])
    return f"- '{label}' over '{rival}': {ratio_text(gain)}; {aim:g} times: {gain.is_above(aim)}"


def _problems(document: Mapping[str, Any]) -> str:
    lines = [f"- {label}: {said}\n" for label, said in document["problems"].items()]
    return "".join(["\ncould not be measured, because\n\n", *lines] if lines else [])
