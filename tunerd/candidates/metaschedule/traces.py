"""What the trace of a sketch says: its knobs, its steps, and the block that it tiles.

A trace's JSON is TVM's: a list of instructions [kind, inputs, attributes, outputs], and a list of
decisions [index, value]. Everything from the instruction EnterPostproc on follows from the rest.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunerd.candidates.metaschedule.access import Access
from tunerd.candidates.metaschedule.knobs import Knob, Location, Option, Tile

Trace = tuple[list[Any], list[Any]]  # as JSON: instructions, and decisions

SOFTWARE_PIPELINE = "software_pipeline_stage"  # TVM's annotation of a loop

# What rules write into a trace from their settings or the target: the cores of a share, a block's
# threads, and whether TVM or NVRTC unrolls.
_SETTINGS = (
    "meta_schedule.parallel",
    "meta_schedule.vectorize",
    "meta_schedule.thread_extent_low_inclusive",
    "meta_schedule.thread_extent_high_inclusive",
)
_UNROLLS = ("meta_schedule.unroll_explicit", "meta_schedule.unroll_implicit")


@dataclass(frozen=True)
class TiledBlock:
    """The block that a sketch tiles: its loops' kinds, and what it reads and writes."""

    name: str
    structure: str  # such as SSSRRSRS: levels of spatial and reduction loops, outermost first
    spatial: tuple[int, ...]  # positions of its tiles in the sketch's knobs
    reduction: tuple[int, ...]
    accesses: tuple[Access, ...]  # reads first, the write last


def before_postprocessing(instructions: Sequence[Any]) -> list[Any]:
    """Return the instructions from which all the others follow."""
    return list(itertools.takewhile(lambda i: i[0] != "EnterPostproc", instructions))


def skeleton_of(instructions: Sequence[Any]) -> str:
    """Return the steps of a trace, less what rules take from their settings or the target."""
    steps = []
    for kind, inputs, attributes, outputs in instructions:
        if kind == "Annotate" and attributes[0] in _SETTINGS:
            steps.append([kind, inputs[:1], attributes, outputs])
        elif kind == "Annotate" and attributes[0] in _UNROLLS:
            steps.append([kind, inputs, _UNROLLS[:1], outputs])
        elif kind == "SamplePerfectTile":
            steps.append([kind, inputs, attributes[:1], outputs])
        elif kind == "SampleCategorical":
            steps.append([kind, inputs, [], outputs])
        else:
            steps.append([kind, inputs, attributes, outputs])
    return json.dumps(steps)


def knobs_of(instructions: Sequence[Any], decided: Mapping[int, Any]) -> list[Knob]:
    """Return what is to be chosen, by what one trace decided; `decided` is by instruction."""
    knobs: list[Knob] = []
    for i, (kind, _, attributes, _) in enumerate(instructions):
        if kind == "SamplePerfectTile":
            parts, max_innermost = attributes
            knobs.append(Tile(i, math.prod(decided[i]), parts, max_innermost))
        elif kind == "SampleCategorical":
            knobs.append(Option(i, tuple(attributes[0])))
        elif kind == "SampleComputeLocation":
            knobs.append(Location(i))
    return knobs


def unroll_knob(instructions: Sequence[Any], knobs: Sequence[Knob]) -> tuple[int, Option] | None:
    """Return the knob that says how far TVM unrolls, and its place among the knobs."""
    drawn = {instructions[k.instruction][3][0]: (i, k) for i, k in enumerate(knobs)}
    for kind, inputs, attributes, _ in instructions:
        if kind == "Annotate" and attributes[0] == _UNROLLS[0]:
            place, knob = drawn.get(inputs[1], (0, None))
            return (place, knob) if isinstance(knob, Option) else None
    return None


def pipeline_copies(instructions: Sequence[Any]) -> int:
    """Return how many copies of its shared buffers a sketch keeps: one for each stage under way."""
    stages = [
        max(inputs[1])
        for kind, inputs, attributes, _ in instructions
        if kind == "Annotate" and attributes == [SOFTWARE_PIPELINE]
    ]
    return 1 + max(stages, default=0)


def tiled_block(
    instructions: Sequence[Any], knobs: Sequence[Knob], accesses: Mapping[str, list[Access]]
) -> TiledBlock | None:
    """Find the block that is tiled over all its loops, each by the tile in the same place.

    accesses: of each block of the task, by its name. None: no block is, or they are not known.
    """
    blocks: dict[str, str] = {}
    structure, tiled = "", ""
    for kind, inputs, attributes, outputs in instructions:
        if kind == "GetSBlock":
            blocks[outputs[0]] = attributes[0]
        elif kind == "Annotate" and attributes == ["meta_schedule.tiling_structure"]:
            structure, tiled = json.loads(inputs[1]), blocks.get(inputs[0], "")
    parts = {i: k.parts for i, k in enumerate(knobs) if isinstance(k, Tile)}
    spatial = tuple(i for i, p in parts.items() if p == structure.count("S"))
    reduction = tuple(i for i, p in parts.items() if p == structure.count("R"))
    known = accesses.get(tiled)
    if known is None or not spatial or set(spatial) & set(reduction):
        return None
    if known[-1].strides.shape[1] != len(spatial) + len(reduction):
        return None
    return TiledBlock(tiled, structure, spatial, reduction, tuple(known))
