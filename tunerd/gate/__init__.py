"""Gate: is the new tuned model slower than the old one, by more than is allowed?

    source -> Side -> Judgement -> GateResult

`sides` loads runs and artifacts, `measuring` measures two artifacts now, `intervals` and `judge`
say what the samples allow to say, `decide` decides. How a result is shown is in `report`.
"""

from __future__ import annotations

from tunerd.gate.decide import (
    GateResult,
    TaskJudgement,
    decide,
    decide_measured,
    not_comparable,
)
from tunerd.gate.judge import Judgement, View
from tunerd.gate.sides import Side, load_sides

__all__ = [
    "GateResult",
    "Judgement",
    "Side",
    "TaskJudgement",
    "View",
    "decide",
    "decide_measured",
    "load_sides",
    "not_comparable",
]
