"""A template's kernel for several models of one architecture: a lane of the launch for each.

The kernel is that of one model, and the grid has its third axis as often as there are lanes. What a
kernel for one model takes as `p0`, `p1`, ... begins for each lane somewhere else: row `lane` of
activations and scratch memory; of weights, as many pieces of memory away as the lane's slot says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import SLOT_BYTES, TensorSpec

MOST_BLOCKS = 65535  # of a grid's third axis
_BLOCK = "tl.program_id(2)"


def text_for(text: str, specs: Sequence[TensorSpec], weights: Collection[int], depth: int) -> str:
    """Return the text of a kernel for lanes from that for one model.

    `specs` and `weights` are of the kernel for one model, whose grid's third axis is `depth`. Its
    pointers stay aligned for vectors of 16 bytes where a row of each tensor ends at such a place.
    """
    head, _, body = text.partition("\n")
    name, _, params = head.partition("(")
    pointers = params.removesuffix("):").split(", ")
    lines = [
        f"lane = tl.cast({_BLOCK} // {depth}, tl.int64)",
        f"block = {_BLOCK} % {depth}",
    ]
    if weights:
        lines.append("slot = tl.cast(tl.load(slots + lane), tl.int64)")
    for i, (pointer, spec) in enumerate(zip(pointers, specs, strict=True)):
        if i in weights:
            step = f"slot * {SLOT_BYTES // dtype_of(spec.dtype).itemsize}"
        else:
            step = f"lane * {math.prod(spec.shape)}"
        lines.append(f"{pointer} = {pointer} + {step}")
    prologue = "".join(f"    {line}\n" for line in lines)
    return f"{name}(slots, {params}\n{prologue}{body.replace(_BLOCK, 'block')}"
