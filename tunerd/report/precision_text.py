"""Which precision a run was asked for or took, and why, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.records import typed
from tunerd.vocabulary import AS_EXPORTED, FP32, STORED_AS, Model, to_json
from tunerd.vocabulary.outcome import TriedPrecision


def precision_asked(settings: Mapping[str, Any]) -> str:
    """Return the precision that the settings ask for, in words."""
    precision, is_auto = settings.get("precision"), settings.get("precision_from") == "auto"
    if not precision:
        return "auto, not chosen yet" if is_auto else f"none: {AS_EXPORTED}"
    chosen = ", chosen by tunerd" if is_auto else ""
    return f"{precision}{chosen}{'' if precision == FP32 else ', sums in fp32'}"


def is_of_storage(note: str) -> bool:
    """Say whether a note of a model is about what is stored in 16 bits, and what stays in fp32."""
    return STORED_AS in note


def storage_sentences(model: Model) -> tuple[str, ...]:
    """Say how much of a model is stored in 16 bits and what stays in fp32; nothing for others."""
    return tuple(filter(is_of_storage, model.notes))


def precision_sentences(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Say which precision a run took, and why no faster one; nothing of one as exported."""
    tried = _tried(settings)
    if not tried:
        return (precision_asked(settings),) if settings.get("precision") else ()
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
