"""`--gpu-pct auto`: say which share was chosen, and what the tuned model makes of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunerd.cli.consoles import steps_shown

if TYPE_CHECKING:
    from tunerd.settings import TuneSettings
    from tunerd.studies.profile.auto import Choice


@dataclass(frozen=True)
class ShareSaid:
    """A choice and its aftermath, for people and for --json."""

    sentences: tuple[str, ...]
    document: dict[str, Any]


def chosen(settings: TuneSettings, *, quiet: bool) -> tuple[TuneSettings, Choice]:
    """Return the settings with a share, and say on stderr which it is."""
    from tunerd.records.paths import Paths
    from tunerd.report.choice_words import choice_sentence
    from tunerd.report.share_page import write_profile
    from tunerd.studies.profile.auto import resolve_share

    with steps_shown(quiet=quiet) as say:
        resolved, choice, found = resolve_share(settings, say)
    if found is not None:
        write_profile(found, Paths(settings.out).shares / "default")
    if not quiet:
        print(choice_sentence(choice), file=sys.stderr, flush=True)
    return resolved, choice


def seen_again(settings: TuneSettings, choice: Choice, artifact: Path, *, quiet: bool) -> ShareSaid:
    """Profile what was tuned and say whether the share was right for it."""
    from tunerd.report.choice_words import aftermath_sentences, choice_sentence
    from tunerd.report.share_page import write_profile
    from tunerd.report.share_words import profile_json
    from tunerd.studies.profile.auto import look_again
    from tunerd.studies.profile.folder import REPORT
    from tunerd.vocabulary import to_json

    with steps_shown(quiet=quiet) as say:
        after, root = look_again(settings, choice, artifact, say)
    write_profile(after.profile, root)
    said = (choice_sentence(choice), *aftermath_sentences(after))
    document = {
        **to_json(choice),
        "tuned_meets": None if after.meets is None else str(after.meets),
        "tuned_p95_secs": after.tail_secs,
        "better_pct": after.better_pct,
        "tuned": profile_json(after.profile),
        "sentences": list(said),
        "report": str(root / REPORT),
    }
    return ShareSaid(said, document)
