"""The JSON Schema of recipes, for editors; made of the commands' flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.studies.recipes.keys import Command, Commands, Key
from tunerd.studies.recipes.merge import GATE, PREFLIGHT, RUNS

_JSON_TYPES = {
    "integer": ["integer"],
    "number": ["number"],
    "boolean": ["boolean"],
    # YAML reads `90` as a number, which is a text and a path as well.
    "text": ["string", "number"],
    "path": ["string", "number"],
}


def json_schema(commands: Commands) -> dict[str, Any]:
    """Return the schema as draft 7, which editors' YAML servers read."""
    tune = {key.name: _property(key, varies=True) for key in commands.tune.keys}
    gate = _section(commands.gate, commands.gate_keys, "Compare each run with a base.")
    before = _section(
        commands.preflight, commands.preflight.keys, "Look at the machine before the first run."
    )
    entry = {"type": ["object", "null"], "additionalProperties": False}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A recipe of tunerd",
        "description": (
            "Keys are the flags of `tunerd tune`. A list for a flag that takes one value makes a "
            "run of each. Relative paths are relative to the recipe."
        ),
        "type": "object",
        "additionalProperties": False,
        "properties": tune
        | {
            PREFLIGHT: before,
            GATE: gate,
            RUNS: {
                "description": "Entries by name; each may say again what the top says.",
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": "^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$"},
                "additionalProperties": entry | {"properties": tune | {GATE: gate}},
            },
        },
    }


def _section(command: Command, keys: Sequence[Key], description: str) -> dict[str, Any]:
    return {
        "description": f"{description} Keys are the flags of `tunerd {command.name}`.",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {key.name: _property(key, varies=False) for key in keys},
    }


def _property(key: Key, *, varies: bool) -> dict[str, Any]:
    one: dict[str, Any] = {"type": _JSON_TYPES[key.kind]}
    if key.choices:
        one = {"enum": list(key.choices)}
    for word, limit in (("minimum", key.minimum), ("maximum", key.maximum)):
        if limit is not None:
            one[word] = limit
    if key.words_too:
        one = {"anyOf": [one, {"enum": list(key.words_too)}]}
    forms = [one, {"type": "null"}]
    if varies or key.is_repeatable:
        forms.append({"type": "array", "items": one, "minItems": 0 if key.is_repeatable else 1})
    return {"description": key.help, "anyOf": forms}
