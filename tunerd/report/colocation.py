"""What `tunerd colocate` found: on the terminal, as JSON and as a page."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tunerd.colocation.bench import Benched
from tunerd.colocation.load.alone import AgainstAlone
from tunerd.colocation.load.generator import TRIM, Observed
from tunerd.colocation.load.outage import Neighbour, Outage
from tunerd.colocation.load.resharing import Changes
from tunerd.colocation.load.result import LoadResult, TenantResult
from tunerd.colocation.plan import LoadChoice, Plan, Proof
from tunerd.colocation.policies import POLICIES
from tunerd.colocation.stats import EngineStats
from tunerd.report import html
from tunerd.report.plot import MOST_LINES, Line, Point, line_plot
from tunerd.report.policies_text import best_sentence, missing_percentiles
from tunerd.report.scales import Scale, latency_scale, latency_tick_text, ticks
from tunerd.report.terminal import shown, table
from tunerd.report.view import Grid, Items, Plot, Section, View, caption
from tunerd.stats.tail import PERCENTILES, samples_needed
from tunerd.system.files import write_whole
from tunerd.system.text import UNKNOWN, count_text, percent_text, secs_text, significant
from tunerd.vocabulary import to_json

RESULT, REPORT = "result.json", "report.html"
_HEIGHT = 240
_HEADS = (
    "policy", "member", "tenant", *(f"p{p}" for p in PERCENTILES), "per second", "asked", "refused",
    "within SLO", "of admitted",
)  # fmt: skip


def bench_json(benched: Benched) -> dict[str, Any]:
    """Return what was found, for json.dumps; `samples_json` has what it comes from."""
    return {
        "plan": benched.plan.model_dump(mode="json"),
        "capacity": benched.capacity,
        "samples_needed": {f"p{p}": samples_needed(p) for p in PERCENTILES},
        "best": None if benched.best is None else [r.policy for r in benched.best.foremost],
        "results": [to_json(r) | {"spread": r.spread} for r in benched.results],
    }


def samples_json(benched: Benched) -> list[dict[str, Any]]:
    """Return all requests of each policy in rounds, those outside of the window, too."""
    return [
        {
            "together": [
                _observed_json(observed)
                | {"outage_at_secs": None if when is None else when.at_secs}
                for observed, when in itertools.zip_longest(rounds.together, rounds.outages)
            ],
            "alone": {
                name: [_observed_json(observed) for observed in each]
                for name, each in rounds.alone.items()
            },
        }
        for rounds in benched.rounds
    ]


def _observed_json(observed: Observed) -> dict[str, Any]:
    return {
        "window_secs": list(observed.window),
        "samples": [
            [
                s.member,
                s.tenant,
                *(round(at, 6) for at in (s.meant_at, s.sent_at, s.ended_at)),
                s.end,
            ]
            for s in observed.samples
        ],
    }


def write_bench(benched: Benched, folder: Path) -> None:
    """Write the page and the document, with all samples, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    document = bench_json(benched) | {"runs": samples_json(benched)}
    write_whole(folder / RESULT, json.dumps(document) + "\n", sync=False)
    html.write_page(folder / REPORT, bench_page(benched))


def bench_table(benched: Benched) -> RenderableType:
    """Return a line for each policy, member and tenant, for rich to print."""
    blocks = (_grid(benched.results), Items(_sentences(benched)), _memory_grid(benched.results))
    said = shown(blocks)
    return Group(Text(_title(benched.plan), style="bold"), said)


def bench_page(benched: Benched) -> str:
    results = benched.results
    sections = (
        Section(
            "What each got",
            (_grid(results), Items(_sentences(benched))),
            _load_text(benched.plan.load),
        ),
        _plot_section(results),
        Section("Memory of each", (_memory_grid(results),)),
        Section(
            "The policies", [Items([f"{r.policy}: {POLICIES[r.policy].about}" for r in results])]
        ),
    )
    return html.page(View(_title(benched.plan), sections))


def checked_table(plan: Plan, stats: EngineStats) -> RenderableType:
    """Return the lanes of a plan that was loaded: who runs where, and what was proved."""
    proofs = {proof.lane: proof for proof in stats.proofs}
    rows = [
        (
            lane.name,
            f"{lane.pct}%",
            *_obtained(proofs.get(lane.name)),
            ", ".join(lane.home),
            ", ".join(lane.guests),
        )
        for lane in stats.lanes
    ]
    total = sum(member.planned_bytes for member in stats.members.values())
    members = count_text(len(plan.members), "member")
    units = "SMs" if plan.device == "cuda" else "cores"
    return Group(
        table(Grid(("lane", "share", units, "which", "members", "guests"), rows, range(1, 3))),
        Text(f"{members} under {stats.policy} in {stats.place}: {_mib(total)} planned, all run"),
        *map(Text, stats.mismatches),
    )


def _obtained(proof: Proof | None) -> tuple[str, str]:
    return (UNKNOWN, UNKNOWN) if proof is None else (str(proof.units), proof.which or UNKNOWN)


def checked_json(plan: Plan, stats: EngineStats) -> dict[str, Any]:
    return {"plan": plan.model_dump(mode="json"), "stats": stats_json(stats)}


def stats_json(stats: EngineStats) -> dict[str, Any]:
    """Return what an engine counted, for json.dumps."""
    return {
        "policy": stats.policy,
        "place": stats.place,
        "members": {name: to_json(member) for name, member in stats.members.items()},
        "lanes": [to_json(lane) for lane in stats.lanes],
        "proofs": [proof.model_dump(mode="json") for proof in stats.proofs],
        "faults": [
            {
                "member": fault.member,
                "reason": fault.reason,
                "lost": [list(seat) for seat in sorted(fault.lost)],
                "retried": fault.retried,
                "recovered_secs": fault.recovered_secs,
            }
            for fault in stats.faults
        ],
        "groups": {name: to_json(group) for name, group in stats.groups.items()},
        "mismatches": stats.mismatches,
    }


def _grid(results: Sequence[LoadResult]) -> Grid:
    rows = [_cells(result, tenant) for result in results for tenant in result.tenants]
    return Grid(_HEADS, rows, numbers=range(3, len(_HEADS)))


def _cells(result: LoadResult, tenant: TenantResult) -> tuple[str, ...]:
    return (
        result.policy,
        tenant.member,
        tenant.tenant,
        *(secs_text(s) for s in (tenant.p50_secs, tenant.p95_secs, tenant.p99_secs)),
        significant(tenant.per_sec),
        f"{tenant.asked:,}",
        f"{tenant.refused + tenant.dropped:,}",
        percent_text(tenant.attainment),
        percent_text(tenant.of_admitted),
    )


def _memory_grid(results: Sequence[LoadResult]) -> Grid:
    """Return what each member was planned to take under each policy, and was found to use.

    Members that are loaded as one have a row together, too: what they use is known of all of them.
    """
    names = {name: None for r in results for name in (*r.planned_bytes, *r.resident_bytes)}
    rows = [(name, *(_memory_text(r, name) for r in results)) for name in names]
    return Grid(("memory planned", *(r.policy for r in results)), rows)


def _memory_text(result: LoadResult, name: str) -> str:
    planned, used = result.planned_bytes.get(name), result.resident_bytes.get(name)
    said = [] if planned is None else [_mib(planned)]
    said += [] if used is None else [f"{_mib(used)} used"]
    return ", ".join(said) or UNKNOWN


def _sentences(benched: Benched) -> list[str]:
    found = []
    for result in benched.results:
        said = [f"{significant(result.per_sec)} inferences per second in all"]
        if result.attainment is not None:
            said.append(f"{percent_text(result.attainment)} within their SLO")
        if result.joules_per_inference is not None:
            said.append(f"{significant(result.joules_per_inference)} J for each")
        memory = result.resident_bytes or result.planned_bytes
        kind = "used" if result.resident_bytes else "planned"
        said.append(f"{_mib(sum(memory.values()))} of memory {kind}")
        said += [
            f"{significant(each)} requests per launch of {name} "
            f"({_sizes_text(result.launches.get(name, {}))})"
            for name, each in result.per_launch.items()
            if each is not None
        ]
        said += [
            f"weights of {name} were brought {count_text(each, 'time')}"
            for name, each in result.brought.items()
            if each
        ]
        if result.faults:
            said.append(_faults_text(result))
        said += result.mismatches
        found.append(f"{result.policy}: {', '.join(said)}")
        found += [f"{result.policy}: {_against_text(each)}" for each in result.against_alone]
        if result.changes is not None:
            found.append(f"{result.policy}: {_changes_text(result.changes)}")
        if result.outage is not None:
            found += [f"{result.policy}: {said}" for said in _outage_texts(result.outage)]
    found += missing_percentiles(benched.results)
    found += lateness(benched)
    if len(benched.results) > 1:
        found.append(best_sentence(benched.best))
    return found


def _faults_text(result: LoadResult) -> str:
    """Say how many faults there were, until when all served again, and what most of them said."""
    reason, times = Counter(result.faults).most_common(1)[0]
    number = sum(result.faults.values())
    of = "" if times == number else f" in {count_text(times, 'time')}"
    return (
        f"{count_text(number, 'fault')}, all served again within "
        f"{secs_text(result.recovered_secs)}:{of} {reason}"
    )


def lateness(benched: Benched) -> list[str]:
    """Say how late requests were sent, where that is no answer's doing; nothing where none were."""
    late = [r.late_secs for r in benched.results if r.late_secs is not None]
    if not late or benched.plan.load.kind == "closed":
        return []
    return [
        f"the sender was late by {secs_text(max(late))} at most in 99 of 100 requests, which "
        "their latencies hold"
    ]


def _sizes_text(launches: Mapping[int, int]) -> str:
    """Say how many launches had how many requests: "12 of 1, 30 of 4"."""
    return ", ".join(f"{count:,} of {size}" for size, count in sorted(launches.items()))


def _against_text(found: AgainstAlone) -> str:
    said = [
        f"{what} {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        for what, ratio in (("p50", found.p50), ("p99", found.p99), ("throughput", found.per_sec))
        if ratio is not None
    ]
    return f"{found.member} beside the others over alone: {', '.join(said) or 'cannot tell'}"


def _changes_text(found: Changes) -> str:
    return (
        f"{count_text(len(found.secs), 'change')} of shares while they served: "
        f"{secs_text(found.median_secs)} in the median, {secs_text(found.longest_secs)} the "
        f"longest; {found.lost:,} of {count_text(found.asked, 'request')} lost"
    )


def _outage_texts(found: Outage) -> list[str]:
    """Return a sentence on the member that was out, and one on each other."""
    times = len(found.rounds)
    said = [
        f"{what} after {', '.join(map(secs_text, known))}"
        for what, known in (
            ("it served again", [r.out_secs for r in found.rounds if r.out_secs is not None]),
            ("all", [r.served_again_secs for r in found.rounds if r.served_again_secs is not None]),
        )
        if known
    ]
    if missing := sum(r.served_again_secs is None for r in found.rounds):
        said.append(
            f"{count_text(missing, 'time')} the load ended before each had answered something that "
            "was sent since; give a longer duration"
        )
    if found.missed:
        said.append(
            f"{count_text(found.missed, 'time')} the request that was to fault was refused before "
            "it ran"
        )
    said.append(
        f"{count_text(found.lost, 'request')} of others lost, {found.lost_own:,} of its own"
    )
    verb = "was killed" if found.cause == "killed" else "faulted"
    often = "once" if times == 1 else f"in {times} rounds"
    about = f"{found.member} {verb} {often}: {'; '.join(said)}"
    return [about, *map(_neighbour_text, found.neighbours if found.rounds else ())]


def _neighbour_text(found: Neighbour) -> str:
    parts = (found.before, found.during, found.after)
    rates = ", ".join(UNKNOWN if p.per_sec is None else significant(p.per_sec) for p in parts)
    tails, longest = (
        ", ".join(map(secs_text, each))
        for each in ([p.p99_secs for p in parts], [p.longest_secs for p in parts])
    )
    return (
        f"{found.member} before, during and after: {rates} answers per second; p99 {tails}; "
        f"the longest {longest}"
    )


def _plot_section(results: Sequence[LoadResult]) -> Section:
    title = "Throughput and tail"
    found = [(r, p99) for r in results if (p99 := r.worst_p99_secs) is not None]
    known = found[:MOST_LINES]
    if not known:
        return Section(
            title, lead="There is nothing to draw: no policy has the p99 of all its tenants."
        )
    across = Scale(0.0, max(r.per_sec for r, _ in known) * 1.1)
    slowest = [p99 for _, p99 in known]
    lines = [
        Line(
            r.policy,
            [Point(r.per_sec, p99, f"{r.policy}: {significant(r.per_sec)}/s, {secs_text(p99)}")],
        )
        for r, p99 in known
    ]
    plot = line_plot(
        lines,
        label="The slowest tenant's p99 over the throughput of all",
        time=across,
        values=latency_scale(min(slowest), max(slowest), log_from=20.0),
        value_text=latency_tick_text,
        height=_HEIGHT,
        places=[(at, f"{at:,.6g}/s") for at in ticks(across)],
    )
    about = "Down and to the right is better. The p99 is that of the slowest tenant."
    if len(found) > MOST_LINES:
        about += f" Drawn are the first {MOST_LINES} policies that have one."
    if missing := [r.policy for r in results if r.worst_p99_secs is None]:
        verb = "is" if len(missing) == 1 else "are"
        about += f" Not drawn {verb} {', '.join(missing)}: not every tenant has a p99 there."
    names = [r.policy for r, _ in known]
    return Section(title, (Plot(plot, names=names), caption(about)))


def _title(plan: Plan) -> str:
    names = ", ".join(member.name for member in plan.members[:4])
    more = f" and {len(plan.members) - 4} more" if len(plan.members) > 4 else ""
    return f"{names}{more} on one device"


def _load_text(load: LoadChoice) -> str:
    how = {
        "closed": "Each client sends when it has its answer: a closed loop of "
        f"{count_text(load.clients, 'client')} per tenant.",
        "poisson": "Requests come at random, at each member's rate.",
        "bursts": "Requests come at random, at each member's rate on average, and "
        f"{significant(load.burst_times)} times as often in bursts.",
        "trace": "Requests come as they were recorded.",
    }[load.kind]
    if load.of_capacity is not None:
        how += f" The rates are {load.of_capacity:g}% of what each got in a closed loop."
    if load.reshare_every is not None:
        how += f" Shares change every {secs_text(load.reshare_every)}."
    if load.kill is not None:
        how += f" The process of {load.kill.member} is killed after {secs_text(load.kill.after)}."
    if load.fault is not None:
        how += (
            f" {load.fault.member} is sent a request that makes it fault after "
            f"{secs_text(load.fault.after)}."
        )
    return (
        f"{how} Latencies count from the moment at which a request was meant to come; the first "
        f"and the last {TRIM:.0%} of {load.duration:g} s are left out."
    )


def _mib(size: int) -> str:
    return f"{significant(size / (1 << 20))} MiB"
