"""Asks ahead for what a cut reads: weights in the order of its steps, and what is added behind.

A model's weights come from memory, and a CPU that fetches ahead by itself stops at the end of each
page. What is asked for beyond the last weight is nothing, and does no harm. What a tile's sums are
added to, as in a residual block, is as large as they are, and lies in many pages: it is asked for
when the tile begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_AHEAD_BYTES = 8 << 10  # of the weights: two pages
_READ, _KEPT, _DATA = 0, 3, 1  # as LLVM's prefetch has them


def steps_ahead(step_bytes: int) -> int:
    """Return how many steps before its use a weight is asked for, of which a step reads so many."""
    return _AHEAD_BYTES // step_bytes


def asked(source: Any, indices: Sequence[Any]) -> Any:
    """Return what asks for the cache line in which an element lies."""
    from tvm import tirx

    address = tirx.address_of(tirx.BufferLoad(source, indices))
    call = tirx.call_intrin("void", "tirx.prefetch", address, _READ, _KEPT, _DATA)
    return tirx.Evaluate(call)
