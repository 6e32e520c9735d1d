"""The JSON Schema of recipes, for editors: pydantic's, of the settings' keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import GenerateJsonSchema

from tunerd.settings.option import Key, keys_of
from tunerd.settings.studies import COMMANDS, PreflightSettings
from tunerd.studies.recipes.recipe import ENTRY_NAME, GATE_KEYS

_DRAFT = "http://json-schema.org/draft-07/schema#"  # which editors' YAML servers read
_TEXT = str | float  # YAML reads `90` as a number, which is a text and a path as well


def json_schema() -> dict[str, Any]:
    """Return the schema of what `read_recipe` reads."""
    tune = keys_of(COMMANDS["tune"])
    gate = _model("Gate", GATE_KEYS, "The keys of `tunerd compare`.")
    check = _model("Preflight", keys_of(PreflightSettings), "The keys of `tunerd preflight`.")
    gated = {"gate": (gate | None, Field(description="Compare each run with a base."))}
    entry = _model("Entry", tune, "What a run says again.", varies=True, **gated)
    sections = gated | {
        "preflight": (check | None, Field(description="Look at the machine before the first run.")),
        "runs": (
            Annotated[
                dict[Annotated[str, Field(pattern=f"^{ENTRY_NAME}$")], entry | None],  # type: ignore[valid-type]
                Field(min_length=1, json_schema_extra={"additionalProperties": False}),
            ],
            Field(description="Entries by name; each may say again what the top says."),
        ),
    }
    about = (
        "Keys are the flags of `tunerd tune`. A list for a flag that takes one value makes a run "
        "of each. Relative paths are relative to the recipe."
    )
    recipe = _model("Recipe", tune, about, varies=True, **sections)
    return {"$schema": _DRAFT} | recipe.model_json_schema(schema_generator=_Plain)


class _Plain(GenerateJsonSchema):
    """Says of a key what it takes, and that none is needed."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return False

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _model(
    name: str, keys: Sequence[Key], about: str, *, varies: bool = False, **sections: Any
) -> type[BaseModel]:
    fields = {key.field: _field(key, varies=varies) for key in keys}
    config = ConfigDict(
        extra="forbid", protected_namespaces=(), json_schema_extra={"description": about}
    )
    return create_model(name, __config__=config, **(fields | sections))


def _field(key: Key, *, varies: bool) -> tuple[Any, Any]:
    one: Any = _TEXT if key.takes is str or key.is_path else key.takes
    if key.constraints:
        one = Annotated[one, *key.constraints]
    forms: Any = one | None
    if key.option.is_repeatable:
        forms |= list[one]
    elif varies:
        forms |= Annotated[list[one], Field(min_length=1)]
    return forms, Field(alias=key.name, description=key.option.help)
