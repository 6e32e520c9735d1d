"""The table of a capacity.json: how many models each way serves, over others, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.colocation.figures import ratio_text
from tunerd.vocabulary.verdict import Interval

FIRST = "PyTorch, one after another"
OVER_FIRST, OVER_BEST = 3.0, 1.25  # that were aimed at

Found = Mapping[str, Any]


def models_of(found: Found) -> Interval:
    """Return how many models were served: at least these, and fewer than the first number not."""
    return Interval(found["most"], found["most"], max(found["most"], found["missed"] - 1))


def over(above: Interval, below: Interval) -> Interval | None:
    """Return a ratio of two numbers of models; None where the second is none."""
    if not below.low:
        return None
    return Interval(above.value / below.value, above.low / below.high, above.high / below.low)


def table(document: Mapping[str, Any]) -> str:
    """Return Markdown: each way's models, and what was aimed at."""
    asked, found = document["asked"], document["found"]
    models = {label: models_of(each) for label, each in found.items()}
    rivals = [label for label in models if label.startswith("PyTorch")]
    best = max(rivals, key=lambda label: models[label].value, default="")
    lines = [
        f"{asked['model']}, {asked['precision']}, {asked['rate']:g} requests a second each, 99 of "
        f"100 within {asked['within_ms']:g} ms; the best of PyTorch is '{best or 'not known'}'",
        "",
        "| way | models | answered a second | p99, ms | over one after another | "
        "over the best of PyTorch |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for label, each in sorted(found.items(), key=lambda item: item[1]["most"]):
        last = next((t for t in reversed(each["tries"]) if t["count"] == each["most"]), None)
        more = " or more" if each["missed"] > asked["most"] else ""
        cells = [label, f"{each['most']}{more}"]
        cells.append("-" if last is None else f"{last['per_sec']:,.0f}")
        cells.append("-" if last is None else f"{last['p99_ms']:.3g}")
        for rival in (FIRST, best):
            gain = over(models[label], models[rival]) if rival in models else None
            cells.append("-" if gain is None else ratio_text(gain))
        lines.append(f"| {' | '.join(cells)} |")
    ours = [label for label in models if label.startswith("engine")]
    if ours:
        winner = max(ours, key=lambda label: models[label].value)
        for rival, aim in ((FIRST, OVER_FIRST), (best, OVER_BEST)):
            gain = over(models[winner], models[rival]) if rival in models else None
            if gain is not None:
                lines += ["", f"- '{winner}' over '{rival}': {ratio_text(gain)}; {aim:g} times: "
                          f"{gain.is_above(aim)}"]  # fmt: skip
    problems = [f"- {label}: {said}" for label, said in document.get("problems", {}).items()]
    if problems:
        lines += ["", "could not be measured, because", "", *problems]
    return "\n".join(lines) + "\n"
