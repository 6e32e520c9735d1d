"""What a bench of policies says in sentences: why a percentile is missing."""

from __future__ import annotations

from collections.abc import Sequence

from tunerd.colocation.load.result import LoadResult, TenantResult
from tunerd.colocation.plan import ONE_TENANT
from tunerd.stats.tail import PERCENTILES, samples_needed

_NAMED = 4  # tenants, at most


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
