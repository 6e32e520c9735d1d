"""What a matrix says, in words that its page and its Markdown share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tunerd.report.view import Grid
from tunerd.studies.matrix.claims import DEFAULT, MARGIN
from tunerd.studies.matrix.levels import Cost
from tunerd.studies.matrix.result import MatrixResult, Times
from tunerd.system.text import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    ratio_texts,
    secs_text,
)
from tunerd.vocabulary import unit_name
from tunerd.vocabulary.verdict import Interval, Verdict

CLAIM_SOURCE = "Dhakal et al., arXiv 2008.03602"
_MOST_CHANGES = 20


def ratio_text(ratio: Interval | None) -> str:
    """Return a ratio with its interval."""
    if ratio is None:
        return UNKNOWN
    text, interval = ratio_texts(ratio)
    return f"{text}{TIMES} ({interval})"


def unit_text(result: MatrixResult) -> str:
    return unit_name(result.unit)


def sms_text(result: MatrixResult, pct: int) -> str:
    """Return how much was obtained at a share: `52 SMs`, `1 core`."""
    return count_text(result.sms[pct], unit_name(result.unit, 1))


def row_text(pct: int) -> str:
    return "default schedules" if pct == DEFAULT else f"tuned at {pct}%"


def headline(result: MatrixResult) -> str:
    """Return the three answers in a sentence."""
    own, cut, middle = (c.answer for c in result.findings.claims)
    return f"Best at its own share: {own}. Poor when cut: {cut}. Robust from the middle: {middle}."


def claims(result: MatrixResult) -> Grid:
    """Return each claim, its answer, and the ratio that decides or why there is none."""
    found = result.findings.claims
    rows = [(c.text, str(c.answer), c.why or ratio_text(c.ratio)) for c in found]
    return Grid(("claim", "answer", "ratio that decides"), rows)


def gains(result: MatrixResult, what: str) -> Grid:
    """Return by share what tuning there gains over tuning for the whole device."""
    rows = [(f"{g.run_at}%", ratio_text(g.ratio)) for g in result.findings.gains]
    return Grid(("run at", what), rows)


def robust_text(result: MatrixResult) -> str:
    found = result.findings
    least = found.robustness[0]
    loses = (
        f"the one tuned at {least.tuned_at}% loses {ratio_text(least.worst)} at worst, at "
        f"{least.worst_at}%"
    )
    if found.robust is not None:
        return f"Most robust: {loses}."
    if found.robust_ratio is None:
        return "There is one artifact only."
    if found.robust_ratio.is_above(1 + MARGIN) is Verdict.NO:
        return f"None is the most robust: {loses}, and another loses as little within 1%."
    return f"Most robust: cannot tell; {loses}, and the intervals of others overlap it."


def robustness(result: MatrixResult) -> Grid:
    """Return by artifact what it loses to the best at other shares."""
    rows = [
        (f"tuned at {r.tuned_at}%", ratio_text(r.worst), f"at {r.worst_at}%", ratio_text(r.mean))
        for r in result.findings.robustness
    ]
    return Grid(("artifact", "worst loss", "where", "mean loss"), rows)


def changed_text(result: MatrixResult) -> str:
    """Say for how many of the tasks that had candidates the winner changes with the share."""
    changed, total = result.changed, len(result.chosen)
    yes, unsure = changed[Verdict.YES], changed[Verdict.CANNOT_TELL]
    alone = len(result.names) - total
    if not total:
        return "No task was measured with a candidate beside its default schedule."
    others = f" {count_text(alone, 'task')} more had the default schedule alone." if alone else ""
    of = f"{yes or 'none'} of {count_text(total, 'task')}"
    if not yes + unsure:
        return f"The best candidate changes with the share for {of}.{others}"
    least, most = (f"{100 * n / total:.0f}%" for n in (yes, yes + unsure))
    between = least if least == most else f"between {least} and {most}"
    return (
        f"The best candidate changes with the share for {of}, does not for "
        f"{changed[Verdict.NO]}, and cannot be told for {unsure}: {between}.{others}"
    )


def changes(result: MatrixResult) -> Grid | None:
    """Return the tasks whose best changes most: task, where, and what the wrong one costs there."""
    found = [
        (c.comparison.ratio_low, c)
        for c in result.changes
        if c.answer is Verdict.YES and c.comparison is not None
    ]
    rows = []
    for _, c in sorted(found, key=lambda f: -f[0])[:_MOST_CHANGES]:
        assert c.comparison is not None
        where = f"the best at {c.tuned_at}%, run at {c.run_at}%"
        rows.append(
            (result.names.get(c.task_id, c.task_id), where, ratio_text(c.comparison.interval))
        )
    return Grid(("task", "where", "slower than the best there"), rows) if rows else None


def costs(result: MatrixResult) -> Grid:
    """Return what each part took, and all shares in units of one level."""
    of = result.costs
    first = f"first level, a whole tunerd tune at {result.findings.middle}%"
    parts = [
        (first, of.one),
        ("of that compiling, verifying and timing the model", of.one_artifact),
        ("later levels: search", of.later),
        ("finalists of all levels, at every share", of.finalists),
        ("artifacts: compile and verify", of.artifacts),
        (f"every artifact at every share, {count_text(of.round_count, 'round')}", of.rounds),
        ("all", of.all),
    ]
    rows = [
        *((name, *_cost_texts(cost)) for name, cost in parts),
        ("search and finalists, all shares over one", *_times_texts(of.kernels_over_one)),
        (
            "with the artifacts and one round, all shares over one",
            *_times_texts(of.artifacts_over_one),
        ),
    ]
    return Grid(("", "core time", "time on slices", "wall"), rows)


def _cost_texts(cost: Cost) -> list[str]:
    values = (cost.cpu_secs, cost.slice_work_secs, cost.wall_secs)
    return [UNKNOWN if secs is None else duration_text(secs) for secs in values]


def _times_texts(over: Mapping[str, Times]) -> list[str]:
    return [times_text(over[name]) for name in ("cpu", "slice", "wall")]


def times_text(times: Times) -> str:
    """Return how many times as much something took."""
    if times.value is None:
        return "cannot be told"
    if times.is_least:  # rounded down
        return f"at least {math.floor(100 * times.value) / 100:.2f}{TIMES}"
    return f"{times.value:.2f}{TIMES}"


def limits_text(result: MatrixResult) -> str:
    """Say what the answers do not hold."""
    middle, trials = result.findings.middle, result.trials
    of_search = (
        "The intervals are of the measurement of these artifacts: another search may end with "
        "others."
        if result.rounds > 1
        else "One round has no interval, so that nothing can be told: let there be more --rounds."
    )
    if not any(result.learns_from.values()):
        few, many = min(trials.values()), max(trials.values())
        counts = f"{few}" if few == many else f"{few} to {many}"
        return (
            f"{of_search} Each share was tuned as if it were the only one, with {counts} trials, "
            "and its kernels are chosen among the finalists of its own search."
        )
    later = sorted({n for pct, n in trials.items() if pct != middle})
    counts = " or ".join(map(str, later))
    unlike = (
        f" {middle}% was tuned first, with {trials[middle]} trials, each other share with "
        f"{counts} and from what was found before: what an answer owes to the share and what to "
        "the trials cannot be told."
        if later and middle in trials
        else ""
    )
    return (
        f"{of_search}{unlike} A share's kernels are chosen among the finalists of all levels, and "
        "need not be what tuning at that share alone would find."
    )


def facts_text(result: MatrixResult) -> str:
    sms = ", ".join(f"{pct}%: {result.sms[pct]}" for pct in result.findings.shares)
    clocks = ""
    if result.clocks_mhz is not None:
        low, high = result.clocks_mhz
        clocks = f" SM clock {low} to {high} MHz."
    unsure = [row_text(p) for p, verdict in result.verified.items() if verdict != "right"]
    checked = f"All artifacts agree with {result.reference}."
    if unsure:
        checked = f"Whether these are right cannot be told: {', '.join(unsure)}."
    return (
        f"{result.device}; {unit_text(result)} obtained: {sms}. "
        f"{count_text(result.rounds, 'round')}.{clocks} {checked}"
    )


def cell_title(row: int, run_at: int, secs: float, beside: Interval | None, loss: Interval) -> str:
    """Return what the pointer shows of a cell."""
    own = "" if beside is None else f"; over the one tuned there {ratio_text(beside)}"
    return (
        f"{row_text(row)}, run at {run_at}%: {secs_text(secs)}; over the best {ratio_text(loss)}"
        f"{own}"
    )
