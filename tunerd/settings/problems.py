"""What is wrong with a value, and which word was meant, in words of people."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_LIMITS = {
    "greater_than": ("gt", "not above"),
    "greater_than_equal": ("ge", "less than"),
    "less_than": ("lt", "not below"),
    "less_than_equal": ("le", "more than"),
}
_TYPES = {"int": "whole number", "float": "number", "bool": "true or false", "string": "text"}


def said_of(problem: ErrorDetails) -> str:
    """Return what pydantic found of one value, as the end of a sentence that names it."""
    kind, given, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind == "missing":
        return "is missing"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("literal_error", "enum"):
        return f"'{given}' is not one of {context['expected'].replace(' or ', ', ')}"
    if kind in _LIMITS:
        name, word = _LIMITS[kind]
        return f"{given} is {word} {context[name]:.15g}"
    of, _, what = kind.partition("_")
    if of in _TYPES and what in ("parsing", "type", "from_float"):
        wanted = _TYPES[of]
        return f"'{given}' is not {wanted if of in ('bool', 'string') else f'a {wanted}'}"
    if kind == "too_short":
        return f"{context['actual_length']} given, and {context['min_length']} needed at least"
    if kind == "too_long":
        return f"{context['actual_length']} given, and {context['max_length']} allowed at most"
    said = problem["msg"]
    return f"{given}: {said[:1].lower()}{said[1:]}"


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word that is most like another; None where none is like it."""
    found = difflib.get_close_matches(word, sorted(allowed), n=1)
    return found[0] if found else None


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Return what to do about an unknown word: the likely one, or all that are allowed."""
    known = sorted(allowed)
    near = nearest(word, known)
    return f"did you mean {near}?" if near else f"allowed are {', '.join(known)}"
