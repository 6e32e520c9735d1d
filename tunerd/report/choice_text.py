"""A share that was chosen, and what the tuned model makes of it, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.system.text import count_text, percent_text, secs_text
from tunerd.vocabulary import to_json, unit_name
from tunerd.vocabulary.verdict import Verdict

if TYPE_CHECKING:
    from tunerd.studies.profile.auto import Aftermath, Choice


def choice_sentence(choice: Choice) -> str:
    """Say which share was chosen, by what, and how sure that is."""
    at = f"share {choice.pct}% ({count_text(choice.sm_count, unit_name(choice.slice_kind, 1))})"
    if choice.slo_ms is None:
        loss = percent_text(choice.loss).replace(".0%", "%")
        by = f"the knee of the default model, within {loss} of the whole device's latency"
    else:
        limit = secs_text(choice.slo_ms / 1e3)
        if choice.found == "none":
            return (
                f"{at}: the default model meets {limit} at no share, and takes "
                f"{secs_text(choice.default_secs)} (p95) there"
            )
        by = f"the default model meets {limit} there (p95 {secs_text(choice.default_secs)})"
    doubt = {
        "found": "",
        "at most": ", and no smaller share was measured",
        "cannot tell": ", and it cannot be told whether a smaller share would do",
        "none": "",
    }[choice.found]
    return f"{at}: {by}{doubt}"


def aftermath_sentences(after: Aftermath) -> tuple[str, ...]:
    """Say whether the tuned model meets the latency at its share, and at which other it would."""
    choice = after.choice
    tail = f"p95 {secs_text(after.tail_secs)}"
    other = "its kernels were tuned for the chosen share, so tune at that one before relying on it"
    if after.meets is None:
        if after.better_pct is None:
            return (f"tuned, it has its knee there, too, as far as can be told; {tail}",)
        return (f"tuned, it has its knee at {after.better_pct}% ({other})",)
    limit = secs_text(after.profile.slo_secs)
    said = {
        Verdict.YES: f"tuned, it meets {limit} at {choice.pct}%: {tail}",
        Verdict.NO: f"tuned, it misses {limit} at {choice.pct}%: {tail}",
        Verdict.CANNOT_TELL: f"tuned, it cannot be told whether it meets {limit} at {choice.pct}%: "
        f"{tail}",
    }[after.meets]
    if after.better_pct is None:
        if after.meets is Verdict.YES:
            return (said, "no smaller share is known to do")
        return (said, f"no share is known to meet {limit}")
    size = "smaller" if after.better_pct < choice.pct else "larger"
    return (said, f"the {size} share {after.better_pct}% is known to meet it ({other})")


def share_sentences(after: Aftermath) -> tuple[str, ...]:
    """Say which share was chosen, and what the tuned model makes of it."""
    return (choice_sentence(after.choice), *aftermath_sentences(after))


def share_json(after: Aftermath) -> dict[str, Any]:
    """Return the same for json.dumps, with the tuned model's profile."""
    from tunerd.report.share_text import profile_json

    return {
        **to_json(after.choice),
        "tuned_meets": None if after.meets is None else str(after.meets),
        "tuned_p95_secs": after.tail_secs,
        "better_pct": after.better_pct,
        "tuned": profile_json(after.profile),
        "sentences": list(share_sentences(after)),
    }
