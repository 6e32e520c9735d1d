"""What `tunerd colocate regulate` found: on the terminal and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.colocation.regulation.find import KIND, RegulatedPlan
from tunerd.report.terminal import table
from tunerd.report.view import Grid
from tunerd.system.text import count_text, secs_text, significant


def regulated_json(found: RegulatedPlan) -> dict[str, Any]:
    """Return the plan, with what was measured, for json.dumps."""
    return {
        "plan": found.plan.model_dump(mode="json"),
        "pays": found.pays,
        "tried": found.tried,
        "bounds_ms": dict(found.bounds_ms),
    }


def regulated_table(found: RegulatedPlan) -> RenderableType:
    """Return a line for each policy and member, and what the best policy is, for rich to print."""
    measured = found.plan.measured
    rows = [
        (
            m.policy,
            significant(m.work),
            f"{m.work / measured[0].work:.2f}",
            name,
            significant(m.per_sec[name]),
            secs_text(m.p99_ms[name] / 1e3),
            secs_text(found.bounds_ms[name] / 1e3),
        )
        for m in measured
        for name in m.per_sec
    ]
    heads = ("policy", "work", f"over {measured[0].policy}", "member", "per second", "p99", "bound")
    policy = found.plan.policy
    said = [f"best: {policy.kind}, of {count_text(found.tried, 'regulation')} and the others above"]
    if policy.kind == KIND:
        for name, stops in policy.parameters["stops"].items():
            where = f"stops after kernel {', '.join(map(str, stops))}" if stops else "does not stop"
            said.append(f"{name} {where}")
        said += [f"apart: {pair}" for pair in policy.parameters.get("apart", ())]
    return Group(table(Grid(heads, rows, numbers=range(1, 3))), *map(Text, said))
