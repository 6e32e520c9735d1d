"""Values as JSON documents."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def to_json(value: Any) -> Any:
    """Return `value` as what json.dumps takes: dataclasses become dicts, tuples lists.

    Protocol buffers and arrays are left out: a value is described, its bulk is not copied.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.repr]
        names += getattr(value, "IN_JSON", ())  # properties that readers look for
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(v) for v in value]
    return value


def finite(document: Any) -> Any:
    """Return a JSON document with null for each number that is not finite: JSON has none."""
    if isinstance(document, dict):
        return {key: finite(each) for key, each in document.items()}
    if isinstance(document, list):
        return [finite(each) for each in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document
