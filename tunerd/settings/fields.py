"""Kinds of fields that the settings of several commands have, each with the flag that says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from tunerd.settings import texts
from tunerd.settings.option import Option
from tunerd.settings.texts import MAX_COUNT, MAX_SECS

FROZEN = ConfigDict(
    frozen=True,
    extra="forbid",
    strict=True,
    hide_input_in_errors=True,
    protected_namespaces=(),
)
RESEARCH = "Research"  # the panel of flags that results do not need

Percent = Annotated[int, Field(ge=1, le=100)]
Secs = Annotated[float, Field(gt=0, le=MAX_SECS)]
SliceKind = Literal["mps", "whole", "cpu", "simulated"]
Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Library = Literal["cublaslt", "cudnn"]


def slice_option(help: str, *, is_filled: bool = False) -> Option:
    """Return `--slice`, which shows the kinds that measure, and names the other one apart."""
    return Option(
        help,
        flag="--slice",
        metavar="<mps|whole|cpu>",
        research="--slice simulated measures nothing: its times follow from names, to try tunerd "
        "itself without a device.",
        is_filled=is_filled,
    )


Level2 = Literal["model", "cold", "warm"]
Shapes = Annotated[
    dict[str, tuple[int, ...]],
    Option(
        "An input's shape: images:1,3,224,224. Repeatable.",
        flag="--shape",
        takes=str,
        is_repeatable=True,
    ),
    BeforeValidator(texts.shapes),
]
Dims = Annotated[
    dict[str, int],
    Option(
        "An open dimension's size: batch=1; for `tunerd tune` also sizes, batch=1,4,8. Repeatable.",
        flag="--dim",
        takes=str,
        is_repeatable=True,
    ),
    BeforeValidator(texts.dims),
]
Batch = Annotated[int | None, Option("Another batch size."), Field(ge=1, le=MAX_COUNT)]
Tuners = Annotated[
    int | None, Option("Search and build processes. [default: by cores]"), Field(ge=1)
]
Cache = Annotated[
    Level2, Option("What of their weights finalists find in the cache.", panel=RESEARCH)
]


Inputs = Annotated[
    Path | None,
    Option(
        "An .npz of the model's inputs, or a folder of them, for verifying and timing. "
        "[default: random]"
    ),
]
Values = Annotated[
    dict[str, float],
    Option(
        "A number for an input: sr=16000. Repeatable.",
        flag="--value",
        takes=str,
        is_repeatable=True,
    ),
    BeforeValidator(texts.values("--value")),
]
Constants = Annotated[
    dict[str, float],
    Option(
        "An input that always has one value, which kernels are made for: sr=16000. Repeatable.",
        flag="--constant",
        takes=str,
        is_repeatable=True,
    ),
    BeforeValidator(texts.values("--constant")),
]
