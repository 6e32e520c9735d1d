"""The sections about a run: what it found, what it asked for and obtained, and what it ran on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from tunerd.report import svg
from tunerd.report.figures import (
    LATENCY_NAMES,
    accuracy_text,
    by_share,
    error_text,
    limits_asked,
    median_of,
    obtained_texts,
    ordered,
    rivals,
    share_asked,
    unit,
    weighted_secs,
)
from tunerd.report.library_text import library_bars, library_text
from tunerd.report.plot import history_plot
from tunerd.report.precision_text import precision_sentences
from tunerd.report.run_view import RunView, SliceView
from tunerd.report.view import (
    Bar,
    Bars,
    Cell,
    Fold,
    Grid,
    Items,
    Pairs,
    Plot,
    Section,
    Words,
    caption,
)
from tunerd.system.text import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    is_known,
    moment_text,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary.outcome import (
    ONNX_RUNTIME,
    Comparison,
    Latency,
    Outcome,
    TaskOutcome,
)
from tunerd.vocabulary.verdict import Interval, SpeedVerdict, Verdict

SHOWN_TASKS = 25
_SHOWN_SLICES = 32
_MOST_OUTPUTS = 25
_LAST_LINES = 6  # of a message; the whole is in the run folder's log
_ENDINGS: dict[SpeedVerdict, str] = {
    Verdict.FASTER: "",
    Verdict.SLOWER: ": slower",
    Verdict.SAME: ": no difference of more than 1%",
    Verdict.CANNOT_TELL: ": the samples cannot tell which is faster",
}
_STYLED = ("tuned", "default", "onnxruntime")  # latencies with a colour of their own
_TASK_STYLES = {
    "Task": "task",
    "Share of time": "share",
    "Calls": "number calls",
    "Default": "number latency",
    "Best": "number latency",
    "Ratio": "number ratio",
    "": "mark",
    "Trials": "number trials",
    "Winner": "winner",
}


def left_out(count: int, one: str) -> Words | None:
    """Say how many lines are not shown; None where all are."""
    return caption(f"And {count_text(count, f'more {one}')}.") if count > 0 else None


# --- before and after --------------------------------------------------------------------------


def latency_section(outcome: Outcome | None) -> Section:
    title = "Before and after"
    if outcome is None:
        return Section(title, lead="The run did not come to compile and time the whole model.")
    bars = latency_bars(outcome.latencies)
    if bars is None:
        return Section(title, lead="No end-to-end latency was measured.")
    beside = rivals(outcome)
    names = [rival.name for rival in beside]
    said = [_over_tuned(rival.name, rival.compared) for rival in beside]
    said.append(_over_tuned("Default", outcome.end_to_end))
    about = (
        "One inference, end to end. Bars are medians, ticks are samples, brackets hold the median "
        "with 95%. Tuned and default were timed in turns"
    )
    if ONNX_RUNTIME in names:
        about += ", ONNX Runtime after them on the same cores"
    if any(name != ONNX_RUNTIME for name in names):
        about += ", PyTorch at the end, in turns with the tuned model once more"
    if not beside:
        is_onnx = outcome.verification.reference == ONNX_RUNTIME
        said.append(
            "Nothing but the default schedules was timed beside it."
            if is_onnx
            else "It is not compared with ONNX Runtime: the model is a Relax module."
        )
    remarks = Items(outcome.remarks) if outcome.remarks else None
    return Section(title, (bars, caption(f"{about}."), remarks), lead=" ".join(said))


def _over_tuned(name: str, compared: Comparison) -> str:
    ratio, interval = ratio_texts(compared.interval)
    return f"{name} over tuned is {ratio}, 95% interval {interval}{_ENDINGS[compared.verdict]}."


def latency_bars(
    latencies: Sequence[Latency], *, title: str = "", beside: Sequence[Latency] = ()
) -> Bars | None:
    """Return a bar for each latency that is known, on one scale with `beside`; None for none."""
    known = [(la, s) for la in ordered(latencies) if (s := median_of(la)) is not None]
    if not known:
        return None
    medians = [s.value for la in (*latencies, *beside) if (s := median_of(la)) is not None]
    highest = max(v for la in (*latencies, *beside) for v in la.run_secs if is_known(v))
    # All samples, but no straggler may flatten every bar.
    scale = min(highest, 1.3 * max(medians)) * 1.02 or 1.0
    return Bars([_bar(latency, seen, scale) for latency, seen in known], title)


def _bar(latency: Latency, seen: Interval, scale_secs: float) -> Bar:
    name = LATENCY_NAMES.get(latency.name, latency.name)
    style = latency.name if latency.name in _STYLED else "other"
    samples = [s for s in latency.run_secs if is_known(s)]
    bounded = is_known(seen.high)
    spoken = secs_range_text(seen.low, seen.high) if bounded else count_text(len(samples), "sample")
    drawn = svg.sample_bar(name, samples, seen, scale_secs=scale_secs, style=style)
    return Bar(name, drawn, secs_text(seen.value), spoken)


# --- asked and obtained ------------------------------------------------------------------------


def slice_section(view: RunView) -> Section:
    """Return what the settings ask for beside what was obtained, and the slices' proofs."""
    title = "Asked and obtained"
    summary = Pairs(_asked_and_obtained(view))
    if not view.slices:
        return Section(title, [summary], "The run ended before its slices were planned.")
    unproved = sum(s.proof is None for s in view.slices)
    lead = "Each slice read inside its own process what it obtained, before it measured anything."
    if unproved == len(view.slices):
        lead = "No slice has proved its cap, so nothing was measured."
    elif unproved:
        lead += f" {count_text(unproved, 'slice')} proved nothing, and measured nothing."
    shown = view.slices[:_SHOWN_SLICES]
    heads = ("Slice", "Runs on", "Obtained", "Mechanism", "Proved", "Trials measured", "Driver")
    unproved_rows = [i for i, each in enumerate(shown) if each.proof is None]
    rows = [_slice_row(each, view) for each in shown]
    grid = Grid(heads, rows, class_="proofs", muted=unproved_rows)
    return Section(title, (summary, grid, left_out(len(view.slices) - len(shown), "slice")), lead)


def _asked_and_obtained(view: RunView) -> list[tuple[str, str]]:
    settings = view.settings
    by = f", by the last of {view.sessions} sessions" if view.sessions > 1 else ""
    rows = [
        ("Share asked", share_asked(settings)),
        ("Share obtained", "; ".join(obtained_texts(view)) or "none was proved"),
        ("Search asked", limits_asked(settings) + by),  # of the last session, whose are known
        ("Search obtained", _obtained_search(view)),
    ]
    given = [
        *(f"{name} {list(sizes)}" for name, sizes in _items(settings.get("shapes"))),
        *(f"{name} = {size}" for name, size in _items(settings.get("dims"))),
        *([f"batch {settings['batch']}"] if settings.get("batch") else []),
    ]
    if given:
        rows.append(("Shapes asked", ", ".join(given)))
    if settings.get("warm_start"):
        rows.append(("Started from", ", ".join(map(str, settings["warm_start"]))))
    return rows


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _obtained_search(view: RunView) -> str:
    parts = [count_text(view.trials, "trial") + (f", {view.failed:,} failed" * bool(view.failed))]
    if view.tuning_secs is not None:
        parts.append(f"{duration_text(view.tuning_secs)} with all else")
    if view.sessions > 1:
        parts.append(f"in {view.sessions} sessions")
    if view.repeated:
        parts.append(f"{count_text(view.repeated, 'attempt')} repeated without blame")
    return ", ".join(parts)


def _slice_row(each: SliceView, view: RunView) -> tuple[str | Cell, ...]:
    proof, spec = each.proof, each.spec
    name, trials, where = Cell(each.slice_id, is_code=True), f"{each.trials:,}", ""
    if spec is not None and spec.gpu_uuid:
        where = spec.gpu_uuid
    elif spec is not None and spec.cores:
        word = "core" if len(spec.cores) == 1 else "cores"
        where = f"{word} {', '.join(map(str, spec.cores))}"
    if proof is None:
        return (name, Cell(UNKNOWN, where), UNKNOWN, UNKNOWN, "not proved", trials, UNKNOWN)
    whole = proof.device_sm_count
    part = f" ({percent_text(proof.sm_count / whole)})" if whole else ""
    again = f"{each.proofs}{TIMES}" if each.proofs > 1 else "once"
    return (
        name,
        Cell(proof.device or UNKNOWN, where),
        f"{proof.sm_count} of {whole} {unit(view)}{part}",
        proof.mechanism,
        again if proof.attached else f"{again}, not attached",
        trials,
        proof.driver or UNKNOWN,
    )


# --- tasks -------------------------------------------------------------------------------------


def task_section(view: RunView) -> Section:
    """Return the tasks, the heaviest first; those after the 25th fold away."""
    grid = task_grid(view.tasks, view.undecided)
    if not grid.rows:
        words = "The model has no task that can be tuned."
        if view.outcome is None:
            words = "The run ended before the model was cut into tasks."
        return Section("Tasks", lead=words)
    rest = None
    if folded := grid.rows[SHOWN_TASKS:]:
        left = percent_text(sum(s.share or 0.0 for s in by_share(view.tasks)[SHOWN_TASKS:]))
        muted = [i - SHOWN_TASKS for i in range(SHOWN_TASKS, len(grid.rows)) if i in grid.muted]
        more = dataclasses.replace(grid, rows=folded, muted=muted)
        rest = Fold(f"and {len(folded)} more, {left} of the time", [more])
    bars = [Words(f"{bar.text}.") for bar in library_bars(view.tasks)]
    shown = dataclasses.replace(grid, rows=grid.rows[:SHOWN_TASKS])
    return Section("Tasks", (*bars, shown, rest), tasks_text(view), class_="tasks")


def tasks_text(view: RunView) -> str:
    """Return how many tasks are tuned, stay at the default and are undecided."""
    of = count_text(len(view.tasks), "task")
    tuned = sum(t.is_tuned for t in view.tasks)
    undecided = len(view.undecided)
    stays = len(view.tasks) - tuned - undecided
    words = f"{tuned} of {of} use a tuned schedule"
    if stays:
        words += f", {stays} stay{'s' if stays == 1 else ''} at the default"
    if not undecided:
        return f"{words}. The share is of the time as shipped."
    verb = "is" if undecided == 1 else "are"
    return f"{words}, {undecided} {verb} not decided. The share is of the best time known."


def task_grid(tasks: Sequence[TaskOutcome], undecided: Collection[str] = ()) -> Grid:
    """Return all tasks, the heaviest first; `undecided` are ids of those with no winner yet."""
    shares = by_share(tasks)
    compared = [c for s in shares if (c := s.task.comparison) is not None]
    scale = svg.ratio_scale([end for c in compared for end in (c.ratio_low, c.ratio_high)])
    rows = [
        (
            Cell(task.name, is_code=True),
            Cell(percent_text(share), drawn=None if share is None else svg.share_bar(share)),
            f"{task.weight:,}",
            secs_text(task.default_secs),
            secs_text(task.best_secs),
            ratio_cell(task.comparison, is_tuned=task.is_tuned),
            Cell(drawn=_mark(task.comparison, scale)),
            _trials(task),
            _winner(task, is_decided=task.task_id not in undecided),
        )
        for task, share in ((entry.task, entry.share) for entry in shares)
    ]
    muted = [i for i, entry in enumerate(shares) if not entry.task.is_tuned]
    return Grid(
        tuple(_TASK_STYLES), rows, range(1, 8), class_="ranked", styles=_TASK_STYLES, muted=muted
    )


def ratio_cell(compared: Comparison | None, *, is_tuned: bool = False) -> Cell:
    """Return a ratio over its interval, or that it cannot be told."""
    if compared is None:
        return Cell(UNKNOWN)
    ratio, interval = ratio_texts(compared.interval)
    if compared.verdict is Verdict.CANNOT_TELL:
        return Cell("cannot tell", interval, style="yellow")
    return Cell(f"{ratio}{TIMES}", interval, style="green" if is_tuned else "")


def _mark(compared: Comparison | None, scale: tuple[float, float]) -> Markup | None:
    if compared is None or UNKNOWN in ratio_texts(compared.interval):
        return None
    return svg.ratio_mark(compared, scale=scale)


def _trials(task: TaskOutcome) -> Cell:
    if task.taken:
        return Cell("from the store", f"run {task.taken.run[:8]}")
    return Cell(f"{task.trials:,}", f"{task.failed:,} failed" if task.failed else "")


def _winner(task: TaskOutcome, *, is_decided: bool) -> Cell:
    if not is_decided:
        return Cell("undecided", task.note)
    said = "; ".join(filter(None, (task.note, library_text(task))))
    if task.is_tuned:
        return Cell(task.winner.candidate_id, said, is_code=True)
    return Cell("default", said)


# --- the search, its failures, and whether the result is right ---------------------------------


def history_section(view: RunView) -> Section:
    title, history = "Best latency over time", view.history
    plot = history_plot(history)
    known = [p for p in history if is_known(p.weighted_best_secs)]
    if plot is None:
        words = "The best did not change." if known else "Not every task got a measurement."
        return Section(title, lead=words)
    first, last = known[0], known[-1]
    lead = (
        f"The tasks' best medians times their calls: {secs_text(first.weighted_best_secs)} after "
        f"{duration_text(first.elapsed_secs)}, {secs_text(last.weighted_best_secs)} after "
        f"{duration_text(last.elapsed_secs)} and {count_text(last.trials, 'trial')}."
    )
    about = (
        "From measurements of the search, which are noisier than the finalists'. Pauses between "
        "sessions are left out."
    )
    return Section(title, (Plot(plot), caption(about)), lead)


def correctness_section(outcome: Outcome | None) -> Section | None:
    if outcome is None:
        return None
    verification = outcome.verification
    lead = {
        Verdict.RIGHT: f"The outputs agree with {verification.reference}.",
        Verdict.WRONG: f"The outputs disagree with {verification.reference}.",
        Verdict.CANNOT_TELL: "Cannot tell whether the outputs are right.",
    }[verification.verdict]
    accuracy = verification.accuracy[:_MOST_OUTPUTS]
    rows = [
        (f"{verification.inputs.capitalize()}s", f"{verification.seeds}"),
        ("Worst error", error_text(verification)),
        ("Tolerance", f"{verification.atol:g} + {verification.rtol:g} {TIMES} |reference|"),
        *((f"Output {of.output}", accuracy_text(of)) for of in accuracy),
        ("Remark", verification.message),
    ]
    return Section("Correctness", [Pairs(rows)], lead)


def failure_section(view: RunView) -> Section:
    """Return how often trials failed in which way, and the last lines of the last of each."""
    title, again = "Failed trials", ""
    if view.repeated:
        verb = "was" if view.repeated == 1 else "were"
        again = (
            f" {count_text(view.repeated, 'attempt')} ended through no fault of the candidate, "
            f"and {verb} repeated."
        )
    if not view.failures:
        return Section(title, lead=f"None.{again}")
    rows = [
        (
            kind.name,
            f"{kind.trials:,}",
            Cell(
                last_lines(kind.message) or UNKNOWN,
                f"logs/trial-{kind.trial_id}.log",
                is_message=True,
            ),
        )
        for kind in view.failures
    ]
    failed = sum(kind.trials for kind in view.failures)
    of = f" ({percent_text(view.failed / view.trials)} of the search)" if view.trials else ""
    lead = f"{count_text(failed, 'trial')} ended without a number{of}.{again}"
    heads = ("Kind", "Trials", "Last message")
    return Section(title, [Grid(heads, rows, class_="failures")], lead)


def last_lines(message: str, most: int = _LAST_LINES) -> str:
    """Return the last lines of a message that say anything."""
    return "\n".join([line for line in message.splitlines() if line.strip()][-most:])


# --- what it depends on ------------------------------------------------------------------------


def model_section(view: RunView) -> Section:
    rows: list[tuple[str, str]] = []
    if view.outcome is not None:
        model = view.outcome.model
        default, best = weighted_secs(view.outcome.tasks)
        kernels = f"{secs_text(default)} with the defaults, {secs_text(best)} as shipped"
        rows += [
            *((f"Input {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.inputs),
            *((f"Output {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.outputs),
            ("Hit rate", f"{percent_text(view.outcome.hit_rate)} of the tasks use a tuned record"),
            ("Sum of kernels", kernels),
            ("Artifact", view.outcome.artifact),
            *(("Changed on import", note) for note in model.notes),
        ]
    rows += [("Precision", said) for said in precision_sentences(view.settings)]
    rows.append(("Digest", view.facts.model_digest))
    return Section("Model", [Pairs(rows, "pairs facts")])


def facts_section(view: RunView) -> Section:
    """Return what the result depends on; settings and host as they were recorded fold away."""
    recorded = [
        *_flat(view.settings, "settings"),
        *_flat(view.host, "host"),
        ("target", view.facts.target.json),
    ]
    fold = Fold("Settings, host and target as recorded", [Pairs(recorded, "pairs facts")])
    return Section("Versions and machine", (Pairs(version_pairs(view), "pairs facts"), fold))


def version_pairs(view: RunView) -> list[tuple[str, str]]:
    """Return versions and machine in the order in which they matter; what is unknown is left out.

    Values come from the store, which may hold anything under any name.
    """
    host = view.host
    packages = versions_of(host.get("packages"))
    tvm = f"apache-tvm {view.facts.tvm_version}"
    if "apache-tvm-ffi" in packages:
        tvm += f", apache-tvm-ffi {packages['apache-tvm-ffi']}"
    others = [
        f"{name} {version}"
        for name, version in packages.items()
        if name not in ("tunerd", "apache-tvm", "apache-tvm-ffi")
    ]
    commit = host.get("commit")
    drivers = sorted({p.driver for p in view.proofs if p.driver})
    rows: list[tuple[str, Any]] = [
        ("tunerd", view.facts.tunerd_version + (f", commit {str(commit)[:12]}" if commit else "")),
        ("Compiler", tvm),
        ("Packages", ", ".join(others)),
        ("Python", host.get("python")),
        ("Device", view.facts.device),
        ("Driver", ", ".join(drivers) or host.get("driver")),
        ("Newest CUDA of the driver", host.get("cuda_version")),
        ("Host", ", ".join(str(host[k]) for k in ("hostname", "platform") if host.get(k))),
        ("CPU", host.get("cpu_model")),
        ("Begun", moment_text(view.began_at)),
    ]
    return [(name, str(value)) for name, value in rows if value]


def versions_of(packages: object) -> dict[str, str]:
    """Return versions by package name, from a mapping or from pairs as JSON has them."""
    if isinstance(packages, Mapping):
        return {str(name): str(version) for name, version in packages.items()}
    if isinstance(packages, list | tuple):
        named = [p for p in packages if isinstance(p, list | tuple) and len(p) == 2]
        return {str(name): str(version) for name, version in named}
    return {}


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    """Return dotted names and values of nested dicts; a list of plain values is one value."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in _flat(v, f"{name}.{k}")]
    if isinstance(value, list | tuple):
        if name.endswith(".packages"):
            return [(f"{name}.{k}", v) for k, v in versions_of(value).items()]
        if any(isinstance(item, Mapping | list | tuple) for item in value):
            return [p for i, item in enumerate(value) for p in _flat(item, f"{name}.{i}")]
        return [(name, ", ".join(map(str, value)))]
    return [(name, UNKNOWN if value is None else str(value))]
