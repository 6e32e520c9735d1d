"""As many slices as those bear who serve on the same device, by slowdowns of pairs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tunerd.api.mix_sources import kind_of_machine
from tunerd.api.run import OnStep
from tunerd.colocation.plan import Plan
from tunerd.colocation.planning.estimates import model_of
from tunerd.colocation.planning.features import architecture_of, at_share, features_of
from tunerd.colocation.planning.kept import kept_pairs
from tunerd.colocation.planning.pairs import PAIRS, Pairs, Side, Slowdown, read_pairs
from tunerd.errors import HostError, TunerdError
from tunerd.records.paths import Paths
from tunerd.system import host
from tunerd.system.text import count_text, percent_text

if TYPE_CHECKING:
    from tunerd.settings import TuneSettings


def beside_serving(settings: TuneSettings, say: OnStep) -> TuneSettings:
    """Return settings with as many slices as slow no member of `serving` by more than its loss.

    What is tuned counts as a model that is always busy at the share of all slices together. Its
    features are those of an artifact of it: of this run, or of one that it starts from. Where
    nothing is known of it, or of pairs like these, the slices stay as they were, which is said.

    Raises InputError for a file that is no plan or no pairs, and HostError where one slice is too
    much by what was estimated.
    """
    if settings.serving is None:
        return settings
    serving = Plan.read(settings.serving)
    device = _device(serving)
    beside = read_pairs(settings.serving.parent / PAIRS)
    folders = [*(m.artifact for m in serving.members), *_artifacts(settings)]
    beside += [
        pair
        for pair in kept_pairs(folders, kind_of_machine(serving.device, host.facts()))
        if replace(pair, origin=None) not in beside
    ]
    known = [pair for pair in beside if pair.device == device]
    model, why = model_of(known)
    own = _tuned(settings)
    if own is None or not known:
        lacking = (
            "no run of this model that left an artifact is in its folder or in --warm-start"
            if own is None
            else f"no pairs of {device} are in {PAIRS} beside the plan, or with its artifacts"
        )
        say(f"what the run costs those who serve is not estimated: {lacking}")
        return settings
    table = Pairs(known, device, model=model)
    sides = [_member(serving, name) for name in (m.name for m in serving.members)]
    most, refused = settings.slices or max(1, 100 // settings.pct), why
    for count in range(most, 0, -1):
        share = min(100, count * settings.pct)
        tuned = Side(own.name, own.architecture, share, at_share(own.features, share))
        found = [(side.name, table.slowdown(side, tuned)) for side in sides]
        if unknown := [each for _, each in found if each.how == "assumed"]:
            refused = unknown[0].note
            continue
        name, worst = max(found, key=lambda each: each[1].interval.high)
        said = _text(count, share, name, worst)
        if worst.interval.high <= 1 + settings.serving_loss:
            say(said)
            return settings.model_copy(update={"slices": count})
        refused = ""
    if refused:
        say(f"what the run costs those who serve is not estimated: {refused}")
        return settings
    raise HostError(
        f"{said}, and --serving-loss allows {percent_text(settings.serving_loss)}; tune on another "
        "device or at a smaller share, or allow more"
    )


def _text(count: int, share: int, name: str, worst: Slowdown) -> str:
    low, high = (percent_text(x - 1) for x in (worst.interval.low, worst.interval.high))
    return (
        f"{count_text(count, 'slice', 'slices')}, {share}% of the device: {name} is slower beside "
        f"it by {percent_text(worst.interval.value - 1)} ({low} to {high}), which was {worst.how}"
    )


def _device(serving: Plan) -> str:
    facts = host.facts()
    return facts.gpus[0].name if serving.device == "cuda" and facts.gpus else facts.cpu_model


def _member(serving: Plan, name: str) -> Side:
    (member,) = (m for m in serving.members if m.name == name)
    share = member.share or 100
    found = at_share(features_of(member.artifact).named(), share)
    return Side(name, architecture_of(member.artifact), share, found)


def _tuned(settings: TuneSettings) -> Side | None:
    """Return the model that is tuned, by an artifact of it that is there."""
    for artifact in _artifacts(settings):
        with contextlib.suppress(TunerdError):
            named = features_of(artifact).named()
            return Side(settings.model.stem, architecture_of(artifact), 100, named)
    return None


def _artifacts(settings: TuneSettings) -> list[Path]:
    """Return where the run, and those from which it starts, have an artifact of the model."""
    return [Paths(run).artifact for run in (settings.out, *settings.warm_start)]
