"""The share of `--gpu-pct auto`: chosen by the default model before tuning, looked at after it.

How much faster tuning makes a model is not known before. So the choice is made by what can be
measured then, the model with its default schedules: the smallest share that meets a latency, or,
where none is asked for, the knee. A tuned model is rarely slower than its defaults, so a latency
that they meet it mostly meets, too, and a smaller share may do for it. The tuned artifact is
therefore profiled in its turn, and what that says is told; the choice is not changed by it, since
kernels that were tuned for one share are not those of another.

shares/choice.json    the choice, written before the tuning starts: the same command keeps to it
shares/default/       the profile that it was made by
shares/tuned-DIGEST/  the profile of the artifact
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tunerd.errors import FolderError
from tunerd.records import typed
from tunerd.records.paths import Paths
from tunerd.runs.folder import prepare
from tunerd.settings import TuneSettings
from tunerd.studies.profile.curve import Found, meets
from tunerd.studies.profile.folder import write_json
from tunerd.studies.profile.measuring import Effort
from tunerd.studies.profile.plan import WHOLE, plan_shares
from tunerd.studies.profile.profile import Profile, at_share, profile
from tunerd.studies.profile.subject import Subject, subject_of_artifact, subject_of_model
from tunerd.system.text import reason_of
from tunerd.vocabulary import to_json
from tunerd.vocabulary.verdict import Answer, Verdict

SHARES = (10, 20, 30, 40, 50, 75, WHOLE)  # coarse: each costs a visit in every round
EFFORT = Effort(rounds=5, duration_secs=1.0)
_CHOICE = "choice.json"


@dataclass(frozen=True)
class Choice:
    """A share, and what it was chosen by."""

    pct: int
    sm_count: int
    found: Found  # how sure it is that no smaller share would do
    slo_ms: float | None  # None: the knee
    loss: float
    default_secs: float  # of the default model at this share: its 95th percentile with a latency
    model_digest: str  # of the file and its shapes
    slice_kind: str


@dataclass(frozen=True)
class Aftermath:
    """What the tuned artifact's own profile says of the choice."""

    choice: Choice
    profile: Profile
    meets: Answer | None  # None without a latency to meet
    tail_secs: float  # at the chosen share
    better_pct: int | None  # the smallest share that is known to do for it, if another one


def resolve_share(
    settings: TuneSettings, say: Callable[[str], None]
) -> tuple[TuneSettings, Choice, Profile | None]:
    """Return settings with the share that was chosen for them, earlier or now.

    The profile is that of the choice; None where an earlier session has made it. Raises FolderError
    where the folder's choice was made for something else.
    """
    subject = _subject(settings)
    folder = Paths(settings.out).shares
    choice = _chosen_before(settings, folder / _CHOICE, subject)
    found = None
    if choice is None:
        shares = plan_shares(settings.slice_kind, SHARES, mps=settings.mps)
        prepare(settings.out)
        found = profile(
            subject,
            shares,
            folder / "default",
            effort=EFFORT,
            say=lambda what: say(f"choosing the share: {what}"),
            slo_secs=settings.slo_secs,
        )
        choice = choose(found, settings, subject.digest)
        write_json(folder / _CHOICE, to_json(choice))
    share = f"{settings.share.unit}_pct"
    return settings.model_copy(update={share: choice.pct}), choice, found


def choose(found: Profile, settings: TuneSettings, model_digest: str) -> Choice:
    """Return the share of a default model's profile; the whole device where none is good enough."""
    (curve,) = found.curves
    answer = found.for_slo[0] if found.for_slo else found.knees[0]
    point = answer.safe or curve.full
    return Choice(
        pct=point.pct,
        sm_count=point.sm_count,
        found=answer.found,
        slo_ms=settings.slo_ms,
        loss=found.loss,
        default_secs=(point.tail if found.for_slo else point.latency).value,
        model_digest=model_digest,
        slice_kind=settings.slice_kind,
    )


def look_again(
    settings: TuneSettings, choice: Choice, artifact: Path, say: Callable[[str], None]
) -> tuple[Aftermath, Path]:
    """Profile the tuned artifact; return what it says of the choice, and the profile's folder."""
    subject = subject_of_artifact(artifact)
    shares = plan_shares(settings.slice_kind, (*SHARES, choice.pct), mps=settings.mps)
    root = Paths(settings.out).shares / f"tuned-{subject.digest[:12]}"
    found = profile(
        subject,
        shares,
        root,
        effort=EFFORT,
        say=lambda what: say(f"looking at the share again: {what}"),
        loss=choice.loss,
        slo_secs=settings.slo_secs,
    )
    return aftermath(choice, found), root


def aftermath(choice: Choice, found: Profile) -> Aftermath:
    """Return what a tuned artifact's profile says of the share that it was tuned at."""
    (curve,) = found.curves
    here = at_share(curve, choice.pct)
    answer = found.for_slo[0] if found.for_slo else found.knees[0]
    verdict = meets(here, found.slo_secs) if found.slo_secs is not None else None
    better = None
    if answer.safe is not None and answer.safe.sm_count != here.sm_count:
        is_smaller = answer.safe.sm_count < here.sm_count
        better = answer.safe.pct if is_smaller or verdict is not Verdict.YES else None
    return Aftermath(choice, found, verdict, here.tail.value, better)


def _subject(settings: TuneSettings) -> Subject:
    return subject_of_model(
        settings.model,
        () if settings.batch is None else (settings.batch,),
        shapes=settings.shapes,
        dims=settings.dims,
        precision=settings.precision or "",
        io_precision=settings.io_precision or "",
        constants=settings.constants,
    )


def _chosen_before(settings: TuneSettings, path: Path, subject: Subject) -> Choice | None:
    if not path.is_file():
        if Paths(settings.out).store.exists():
            raise FolderError(
                f"{settings.out} holds a run whose share was given as a number; give that number, "
                "or choose another folder with --out"
            )
        return None
    try:
        choice = typed.of_kind(Choice, json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise FolderError(
            f"{path} cannot be read ({reason_of(error)}); choose another folder with --out"
        ) from None
    asked = (subject.digest, settings.slice_kind, settings.slo_ms)
    if (choice.model_digest, choice.slice_kind, choice.slo_ms) != asked:
        raise FolderError(
            f"the share in {settings.out} was chosen for another model, --slice or --slo-ms; "
            "continue it as it was started, or choose another folder with --out"
        )
    return choice
