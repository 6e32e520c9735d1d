"""What a bench of policies says in sentences: which is best, and why a percentile is missing."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.colocation.load.best import Best
from tunerd.colocation.load.result import LoadResult, TenantResult
from tunerd.colocation.plan import ONE_TENANT
from tunerd.stats.tail import PERCENTILES, samples_needed
from tunerd.system.text import percent_text, secs_text

_NAMED = 4  # tenants, at most


def best_sentence(best: Best | None) -> str:
    """Say which policy met the objectives best, or that it cannot be told."""
    if best is None:
        return "no policy is called best: the plan has no objective; give members an slo_ms"
    first, *others = best.foremost
    behind = ", ".join(_attained(each) for each in best.behind)
    if not others:
        return (
            f"best by the plan's objectives: {_attained(first)} of all requests within their SLO; "
            f"behind it: {behind}"
        )
    said = "best" if behind else "no policy is best"
    said += f" by the plan's objectives: {', '.join(map(_attained, best.foremost))} of all requests"
    said += " within their SLO, which cannot be told apart"
    if behind:
        said += f"; behind them: {behind}"
    if best.is_short:
        return f"{said} in so short a time: give a longer --duration"
    tails = [(each.policy, each.worst_p99_secs) for each in best.foremost]
    if all(secs is not None for _, secs in tails):
        said += "; the slowest tenant's p99: "
        said += ", ".join(f"{policy} {secs_text(secs)}" for policy, secs in tails)
    return said


def _attained(result: LoadResult) -> str:
    return f"{result.policy} {percent_text(result.attainment)}"


def missing_percentiles(results: Sequence[LoadResult]) -> list[str]:
    """Say of each policy which percentiles are not told, of whom, and why."""
    found = []
    for result in results:
        short = [t for t in result.tenants if t.done < samples_needed(max(PERCENTILES))]
        if not short:
            continue
        least = min(tenant.done for tenant in short)
        takes = [
            f"p{p} takes {samples_needed(p)}" for p in PERCENTILES if least < samples_needed(p)
        ]
        had = [f"{_name(t)} had {t.done:,} of {t.asked:,}" for t in short[:_NAMED]]
        if len(short) > _NAMED:
            had.append(f"and {len(short) - _NAMED} more too few")
        found.append(
            f"{result.policy}: {', '.join(takes)} answered requests; {', '.join(had)}; give a "
            "longer --duration"
        )
    return found


def _name(tenant: TenantResult) -> str:
    return tenant.member if tenant.tenant == ONE_TENANT else f"{tenant.member} {tenant.tenant}"
