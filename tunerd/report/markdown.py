"""A report as Markdown for a pull request: a verdict, small tables, the rest folded away."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tunerd.report.comparison import NamedRun, against_first, task_rows
from tunerd.report.comparison_page import title_text
from tunerd.report.facts_section import version_pairs
from tunerd.report.figures import LATENCY_NAMES, by_share, headline, share_asked, spread
from tunerd.report.slice_section import obtained_texts
from tunerd.report.story import Story
from tunerd.report.words import (
    TIMES,
    UNKNOWN,
    count_text,
    duration_text,
    one_line,
    percent_text,
    ratio_texts,
    secs_range_text,
    secs_text,
)
from tunerd.vocabulary import Comparison, TaskOutcome, Verdict

SHOWN_TASKS = 100  # a comment on GitHub holds 65,536 characters
_MOST_CHARS = 200  # of a name
_MARKUP = re.compile(r"[!-/:-@\[-`{-~]")  # ASCII punctuation, which is all that Markdown reads
_PLAIN = set(".,;()%-'\"/+=")
_MENTIONS = set("@#:")
_COLON = re.compile(r":(?=\s|$)")  # which begins neither an address nor an emoji
_ADDRESS = re.compile(r"(?<=www)\.", re.IGNORECASE)


def story_markdown(story: Story) -> str:
    """Return a run's verdict, its latencies, and its tasks folded away."""
    parts = [
        _verdict(story),
        _latency_table(story),
        _failures(story),
        _folded(_tasks_title(story), _task_table(story)),
        _provenance(story),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparison_markdown(runs: Sequence[NamedRun]) -> str:
    """Return runs beside the first, what is not comparable, and their kernels folded away."""
    others = against_first(runs)
    beside = {id(other.run): other for other in others}
    rows = []
    for run in runs:
        outcome = run.story.outcome
        compared = outcome.end_to_end if outcome else None
        other = beside.get(id(run))
        first = "the first"
        if other is not None:
            first = _ratio(other.comparison) if other.comparison else "not comparable"
        rows.append(
            (
                code(run.label),
                text(share_asked(run.story.settings)),
                "<br>".join(text(t) for t in obtained_texts(run.story)) or UNKNOWN,
                secs_text(compared.base_secs if compared else None),
                secs_text(compared.new_secs if compared else None),
                _ratio(compared),
                first,
            )
        )
    heads = ("Run", "Asked", "Obtained", "Default", "Tuned", "Default / tuned", "First / this")
    remarks = [
        f"- {code(other.run.label)}: {label} {text('; '.join(said))}"
        for other in others
        for label, said in (("not comparable,", other.obstacles), ("differs in", other.remarks))
        if said
    ]
    kernels = task_rows(runs)
    kernel_rows = [
        (code(row.name), *(_best(task, run) for task, run in zip(row.tasks, runs, strict=True)))
        for row in kernels[:SHOWN_TASKS]
    ]
    kernel_heads = ("Task", *(code(run.label) for run in runs))
    summary = f"Best of {count_text(len(kernels), 'kernel')}, default in parentheses"
    parts = [
        f"**{text(title_text(runs))}**",
        _table(heads, rows, numbers=range(3, 7)),
        "\n".join(remarks),
        _folded(
            summary,
            _table(kernel_heads, kernel_rows, numbers=range(1, len(kernel_heads))),
            left=len(kernels) - SHOWN_TASKS,
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# --- text that stays text ----------------------------------------------------------------------


def code(name: str) -> str:
    """Return a name as code, in which nothing is markup, a mention, a reference or an emoji.

    What is no plain word is written in entities: those make text only, also between the bars of a
    table (https://spec.commonmark.org/0.31.2/#entity-and-numeric-character-references). An empty
    comment after an at sign keeps an address from becoming a link.
    """
    name = one_line(name)
    if len(name) > _MOST_CHARS:
        name = f"{name[: _MOST_CHARS - 1]}…"
    if re.fullmatch(r"[\w.-]+( [\w.-]+)*", name):
        return f"`{name}`"
    return f"<code>{_MARKUP.sub(_entity, name) or UNKNOWN}</code>"


def text(words: str) -> str:
    """Return a sentence in which nothing is markup or a mention."""
    words = one_line(words)
    plain = {m.start() for m in _COLON.finditer(words)}
    marked = {m.start() for m in _ADDRESS.finditer(words)}

    def written(match: re.Match[str]) -> str:
        is_plain = match[0] in _PLAIN or match.start() in plain
        return match[0] if is_plain and match.start() not in marked else _entity(match)

    return _MARKUP.sub(written, words)


def _entity(match: re.Match[str]) -> str:
    entity = f"&#{ord(match[0])};"
    return f"{entity}<!-- -->" if match[0] in _MENTIONS else entity


# --- pieces ------------------------------------------------------------------------------------


def _verdict(story: Story) -> str:
    verdict = headline(story)
    what = f"{code(story.name)} at {text(share_asked(story.settings))}"
    return f"**{what}: {text(verdict.claim)}** {text(verdict.grounds)}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: range) -> str:
    """Return a table whose columns in `numbers` are aligned to the right."""
    rule = ("--:" if i in numbers else "---" for i in range(len(heads)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _folded(summary: str, body: str, *, left: int = 0) -> str:
    """Return a part that is closed at first. The blank lines make what is in it Markdown."""
    more = f"\n\nand {left:,} more" if left > 0 else ""
    return f"<details><summary>{text(summary)}</summary>\n\n{body}{more}\n\n</details>"


def _latency_table(story: Story) -> str:
    rows = []
    for latency in story.outcome.latencies if story.outcome else ():
        seen = spread(latency.run_secs)
        interval = UNKNOWN
        if seen and seen.low_secs is not None and seen.high_secs is not None:
            interval = secs_range_text(seen.low_secs, seen.high_secs)
        name = LATENCY_NAMES.get(latency.name)
        median = secs_text(seen.median_secs if seen else None)
        rows.append((name or code(latency.name), median, interval))
    return _table(("Model", "Median", "95% interval"), rows, numbers=range(1, 3)) if rows else ""


def _failures(story: Story) -> str:
    if not story.failures:
        return ""
    kinds = ", ".join(f"{kind.trials:,} {text(kind.name)}" for kind in story.failures)
    return f"Failed trials: {kinds}."


def _tasks_title(story: Story) -> str:
    tuned = sum(t.is_tuned for t in story.tasks)
    return f"{tuned} of {count_text(len(story.tasks), 'task')} use a tuned schedule"


def _task_table(story: Story) -> str:
    shares = by_share(story.tasks)
    rows = [
        (
            code(share.task.name),
            percent_text(share.share),
            f"{share.task.weight:,}",
            secs_text(share.task.default_secs),
            secs_text(share.task.best_secs),
            _ratio(share.task.comparison),
            f"{share.task.trials:,}",
            _winner(share.task, story),
        )
        for share in shares[:SHOWN_TASKS]
    ]
    heads = ("Task", "Share", "Calls", "Default", "Best", "Ratio", "Trials", "Ships")
    table = _table(heads, rows, numbers=range(1, 7))
    rest = len(shares) - SHOWN_TASKS
    return f"{table}\n\nand {rest:,} more" if rest > 0 else table


def _winner(task: TaskOutcome, story: Story) -> str:
    if task.task_id in story.undecided:
        return "undecided"
    if task.is_tuned:
        return "tuned"
    return f"default: {text(task.note[:_MOST_CHARS])}" if task.note else "default"


def _ratio(compared: Comparison | None) -> str:
    if compared is None:
        return UNKNOWN
    ratio, interval = ratio_texts(compared.ratio, compared.ratio_low, compared.ratio_high)
    if compared.verdict is Verdict.CANNOT_TELL:
        return f"cannot tell ({interval})"
    return f"{ratio}{TIMES} ({interval})"


def _best(task: TaskOutcome | None, run: NamedRun) -> str:
    if task is None:
        return UNKNOWN
    mark = "?" if task.task_id in run.story.undecided else ""
    return f"{secs_text(task.best_secs)}{mark} ({secs_text(task.default_secs)})"


def _provenance(story: Story) -> str:
    known = dict(version_pairs(story))
    versions = [str(known[name]) for name in ("Compiler", "Driver") if known.get(name)]
    words = [
        *obtained_texts(story),
        count_text(story.trials, "trial"),
        duration_text(story.tuning_secs),
        f"tunerd {known.get('tunerd', UNKNOWN)}",
        *versions,
    ]
    return f"<sub>{text('; '.join(words))}</sub>"
