"""Tables of what latency.py wrote, and answers to what each part asks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from lab.colocation.figures import p99_ms, ratio_text
from tunerd.stats.interval import median_interval
from tunerd.vocabulary.verdict import Interval

# What each part was to show: limits of ratios, of an attainment, of a spread, of bytes.
BESIDE_P99, SHORT_P99, LONG_RATE = 1.07, 1.25, 0.95
ADMITTED, SPREAD, MORE_BYTES, RECOVERY_SECS = 0.995, 0.05, 20 << 20, 5.0
RESHARE_SECS = 0.005

Document = Mapping[str, Any]
_FOUND = ("policies", "replicas", "rounds", "change_secs")  # of one part or another
_ENERGY = "J an inference"  # of the whole GPU, idle power included, over those of all members


def tables(folder: Path) -> str:
    """Return Markdown of all parts in a folder."""
    made = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text())
        if document.get("part") in _TABLES:
            has_some = any(key in document for key in _FOUND)
            lines = _TABLES[document["part"]](document) if has_some else []
            problems = [f"- {what}: {said}" for what, said in document["problems"].items()]
            if problems:
                problems = ["", "could not be measured, because", "", *problems]
            made.append(
                "\n".join([f"## {path.stem} ({document['secs']:.0f} s)", "", *lines, *problems])
            )
    return "\n\n".join(made) + "\n"


def interval_of(said: Mapping[str, float] | None) -> Interval | None:
    return None if said is None else Interval(said["value"], said["low"], said["high"])


def latencies(rounds: Sequence[Document], member: str) -> list[int]:
    """Return the microseconds of a member in all rounds."""
    return [us for each in rounds for us in each["members"].get(member, {}).get("latencies_us", ())]


def spread_of(each: Document) -> float:
    """Return by how much the slowest member's median is over the fastest's in one round."""
    medians = [float(statistics.median(m["latencies_us"])) for m in each["members"].values()]
    return max(medians) / min(medians) - 1.0


def rate_spread_of(each: Document) -> float:
    """Return by how many more answers the fastest member had than the slowest in one round."""
    done = [float(m["ends"]["done"]) for m in each["members"].values()]
    return max(done) / min(done) - 1.0


def admitted_in_time(found: Document) -> Interval:
    """Return the part of what was admitted that was answered within its SLO.

    The interval is exact for requests that are independent (Clopper and Pearson, 1934), which those
    of one burst are not.
    """
    slos = {m["name"]: m["slo_ms"] * 1e3 for m in found["plan"]["members"] if m.get("slo_ms")}
    met = asked = 0
    for each in found["together"]:
        for name, slo_us in slos.items():
            mine = each["members"].get(name, {"latencies_us": [], "ends": {}})
            met += sum(us <= slo_us for us in mine["latencies_us"])
            asked += sum(mine["ends"].values()) - mine["ends"].get("refused", 0)
    if not asked:
        return Interval(0.0, 0.0, 1.0)
    low, high = binomtest(met, asked).proportion_ci(0.95)
    return Interval(met / asked, float(low), float(high))


def _joules(found: Document) -> str:
    joules = found["result"].get("joules_per_inference")
    return "-" if joules is None else f"{joules:.3g}"


# --- one function for each part ----------------------------------------------------------------


def _against(document: Document, member: str, key: str, limit: float, what: str) -> list[str]:
    lines = [f"| {what} | beside | alone | ratio | at most {limit:g} | {_ENERGY} |"]
    lines.append("|---|--:|--:|--:|---|--:|")
    for policy, found in document["policies"].items():
        (said,) = (a for a in found["result"]["against_alone"] if a["member"] == member)
        ratio = interval_of(said[key])
        tails = [
            p99_ms(latencies(rounds, member))
            for rounds in (found["together"], found["alone"][member])
        ]
        cells = ["-" if ms is None else f"{ms:.3g} ms" for ms in tails]
        cells.append("-" if ratio is None else ratio_text(ratio))
        cells.append("-" if ratio is None else str(ratio.is_within(limit)))
        cells.append(_joules(found))
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def _beside(document: Document) -> list[str]:
    return _against(document, "tenant", "p99", BESIDE_P99, "p99 beside three busy copies")


def _mixed(document: Document) -> list[str]:
    lines = _against(document, "short", "p99", SHORT_P99, "p99 of the short one")
    lines += ["", f"| the long one | per second | over alone | at least {LONG_RATE:g} |"]
    lines.append("|---|--:|--:|---|")
    for policy, found in document["policies"].items():
        (said,) = (a for a in found["result"]["against_alone"] if a["member"] == "long")
        ratio = interval_of(said["per_sec"])
        rate = sum(t["per_sec"] for t in found["result"]["tenants"] if t["member"] == "long")
        cells = ["-", "-"] if ratio is None else [ratio_text(ratio), str(ratio.is_above(LONG_RATE))]
        lines.append(f"| {policy} | {rate:.1f} | {' | '.join(cells)} |")
    return lines


def _bursts(document: Document) -> list[str]:
    lines = [
        f"| bursts | capacity, per second | answered | of all in time | of admitted | "
        f"at least {ADMITTED:.1%} | {_ENERGY} |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for policy, found in document["policies"].items():
        part, result = admitted_in_time(found), found["result"]
        cells = [
            f"{sum(document['capacity'].values()):,.0f}",
            f"{result['per_sec']:,.0f}",
            f"{result['attainment'] or 0:.2%}",
            f"{part.value:.3%} ({part.low:.3%} to {part.high:.3%})",
            str(part.is_above(ADMITTED)),
            _joules(found),
        ]
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def _replicas(document: Document) -> list[str]:
    limit = f"at most {SPREAD:.0%}"
    lines = [
        f"| ten replicas | per second | their medians differ by | {limit} | rates | {limit} | "
        f"{_ENERGY} |",
        "|---|--:|--:|---|--:|---|--:|",
    ]
    for policy, found in document["policies"].items():
        cells = [f"{found['result']['per_sec']:,.0f}"]
        for spread in (spread_of, rate_spread_of):
            among = _among([spread(each) for each in found["together"]])
            cells.append(f"{among.value:.1%} ({among.low:.1%} to {among.high:.1%})")
            cells.append(str(among.is_within(SPREAD)))
        cells.append(_joules(found))
        lines.append(f"| {policy} | {' | '.join(cells)} |")
    return lines


def _among(values: Sequence[float]) -> Interval:
    """Return the median; of so few rounds, which may be anywhere between them, with extremes."""
    interval = median_interval(values) if len(values) > 5 else None
    return interval or Interval(statistics.median(values), min(values), max(values))


def _density(document: Document) -> list[str]:
    weights = document["weights_bytes"]
    lines = [
        "| replicas | loaded in | per second | p99, ms | one more takes | beyond its weights |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for each in document["replicas"]:
        observed = each["observed"]
        found = [us for m in observed["members"].values() for us in m["latencies_us"]]
        late = each["resident_bytes"][each["count"] // 2 :]
        more = float(np.mean(late))
        tail = p99_ms(found)
        cells = [
            str(each["count"]),
            f"{each['load_secs']:.1f} s",
            f"{len(found) / observed['window_secs']:,.0f}",
            "-" if tail is None else f"{tail:.3g}",
            f"{more / (1 << 20):.1f} MiB",
            f"{(more - weights) / (1 << 20):+.1f} MiB, at most {MORE_BYTES >> 20}: "
            f"{'yes' if more - weights <= MORE_BYTES else 'no'}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reshare(document: Document) -> list[str]:
    secs = document["change_secs"]
    interval = median_interval(secs)
    assert interval is not None
    done = document["ends"].get("done", 0)
    lost = sum(document["ends"].values()) - done
    tail = p99_ms(document["latencies_us"])
    return [
        f"- {len(secs)} changes: {interval.value * 1e3:.2f} ms ({interval.low * 1e3:.2f} to "
        f"{interval.high * 1e3:.2f}), the longest {max(secs) * 1e3:.2f} ms; at most "
        f"{RESHARE_SECS * 1e3:g} ms: {interval.is_within(RESHARE_SECS)}",
        f"- {done:,} requests answered, {lost} lost"
        + ("" if tail is None else f", p99 {tail:.3g} ms")
        + ("" if document["is_under_load"] else "; the load ended before the last change"),
    ]


def _faults(document: Document) -> list[str]:
    lines = [
        f"| fault | all served again in | at most {RECOVERY_SECS:g} s | others failed | culprit |",
        "|--:|--:|---|--:|---|",
    ]
    for number, each in enumerate(document["rounds"], start=1):
        secs = each["secs"]
        cells = [
            "never" if secs is None else f"{secs:.2f} s",
            "yes" if secs is not None and secs <= RECOVERY_SECS else "no",
            str(each["failed"]),
            "serves again" if each["culprit_serves"] else "does not serve",
        ]
        lines.append(f"| {number} | {' | '.join(cells)} |")
    said = [
        f"{report['member'] or 'nobody'} "
        + ("never" if (secs := report["recovered_secs"]) is None else f"{secs:.2f} s")
        for report in document.get("reports", ())  # of runs without a recipe
    ]
    if said:
        lines.append(
            f"- the engine's own reports, who was to blame and until when: {', '.join(said)}"
        )
    lines.append(f"- a new process with all in it takes {document['restart_secs']:.1f} s to serve")
    return lines


_TABLES: Mapping[str, Callable[[Document], list[str]]] = {
    "beside": _beside,
    "mixed": _mixed,
    "bursts": _bursts,
    "replicas": _replicas,
    "density": _density,
    "reshare": _reshare,
    "faults": _faults,
}
