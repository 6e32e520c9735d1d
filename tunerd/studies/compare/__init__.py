"""Gate: is the new tuned model slower than the old one, by more than is allowed?

    source -> Side -> Judgement -> GateResult

`sides` loads runs and artifacts, `measuring` measures two artifacts now, `intervals` and `judge`
say what the samples allow to say, `decide` decides. How a result is shown is in `report`.
"""

from __future__ import annotations

from tunerd.stats.gate import Judgement, View
from tunerd.studies.compare.decide import (
    GateResult,
    TaskJudgement,
    decide,
    decide_measured,
    not_comparable,
)
from tunerd.studies.compare.sides import Side, load_sides

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
