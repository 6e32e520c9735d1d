"""What the folder of a run is called where nobody names it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

Shapes = Mapping[str, Sequence[int]]
_NOTHING: Mapping[str, int] = MappingProxyType({})


def run_folder(name: str, share: str) -> Path:
    """Return the folder of a model's run: `runs/model-gpu40`."""
    return Path("runs") / f"{name}-{share}"


def sized_name(
    name: str,
    *,
    batch: int | None = None,
    shapes: Shapes = MappingProxyType({}),
    dims: Mapping[str, int] = _NOTHING,
) -> str:
    """Return a model's name for a folder, with the sizes that its inputs are given: `model-b4`."""
    sizes = [f"b{batch}"] if batch is not None else []
    sizes += [f"{of}{'x'.join(map(str, shape))}" for of, shape in shapes.items()]
    sizes += [f"{of}{size}" for of, size in dims.items()]
    plain = (re.sub("[:=]", "", text.replace(",", "x")) for text in sizes)
    return "-".join((name, *(re.sub(r"[^\w.]+", "_", text) for text in plain)))
