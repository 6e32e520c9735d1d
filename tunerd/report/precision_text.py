"""Which precision `--precision auto` took, and why, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.records import typed
from tunerd.vocabulary import to_json
from tunerd.vocabulary.outcome import TriedPrecision


def precision_sentences(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Say which precision a run took, and why no faster one; nothing where it was given."""
    tried = _tried(settings)
    if not tried:
        return ()
    *others, taken = tried
    return (_taken(taken, is_only=not others), *(f"{o.precision}: {o.refused}" for o in others))


def precision_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the precision of a run for json.dumps: which, who said so, and what was tried."""
    return {
        "precision": settings.get("precision"),
        "from": settings.get("precision_from", "flag"),
        "tried": to_json(_tried(settings)),
        "sentences": list(precision_sentences(settings)),
    }


def _tried(settings: Mapping[str, Any]) -> tuple[TriedPrecision, ...]:
    try:
        return typed.of_kind(tuple[TriedPrecision, ...], settings.get("precision_tried") or ())
    except ValueError:  # a store may hold anything
        return ()


def _taken(tried: TriedPrecision, *, is_only: bool) -> str:
    said = f"{tried.precision}, chosen by tunerd"
    if tried.error is not None:
        return f"{said}: off by at most {tried.error:.2g} of an output's largest value"
    if is_only:
        return f"{said}: kernels compute in it here, whatever is stored"
    return f"{said}: no faster one stays near enough"
