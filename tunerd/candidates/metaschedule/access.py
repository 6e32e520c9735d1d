"""How a block of a task reads and writes its buffers, and the bytes that a tile of it touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tvm.ir import IRModule

MAX_READS = 3  # buffers of a block that are told apart


@dataclass(frozen=True)
class Access:
    """How a block reads or writes a buffer: per dimension, the stride of each loop, and an extent.

    A tile of t_i iterations of loop i touches sum(strides_i * (t_i - 1)) + extent elements of a
    dimension, at most its whole length.
    """

    strides: npt.NDArray[np.int64]  # [dimension, loop]
    extents: npt.NDArray[np.int64]
    shape: npt.NDArray[np.int64]
    element_bytes: int

    def tile_bytes(self, tile: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the bytes that tiles touch; `tile` is [choice, loop]."""
        touched = (tile - 1) @ self.strides.T + self.extents
        return np.asarray(np.minimum(touched, self.shape).prod(axis=1) * self.element_bytes)


def accesses_of(mod: IRModule) -> dict[str, list[Access]]:
    """Return how each block of a module reads and writes its buffers, by the block's name.

    Loops come in the order of the block's iterators. An index that is not linear in them counts as
    if it touched the whole dimension.
    """
    from tvm.s_tir import Schedule

    found: dict[str, list[Access]] = {}
    schedule = Schedule(mod, error_render_level="fast")
    for block_rv in schedule.get_child_blocks(schedule.get_sblock("root")):
        block = schedule.get(block_rv)
        loops = [i.var for i in block.iter_vars]
        reads = [
            r for r in block.reads if r.source.name not in {w.source.name for w in block.writes}
        ]
        regions = [*reads[:MAX_READS], *list(block.writes)[:1]]
        if len(loops) and len(regions) > 1:
            found[block.name_hint] = [_access(region, loops) for region in regions]
    return found


def _access(region: Any, loops: Sequence[Any]) -> Access:
    from tvm import DataType
    from tvm.sym import detect_linear_equation

    shape = [int(s) for s in region.source.shape]
    strides = np.zeros((len(shape), len(loops)), dtype=np.int64)
    extents = np.ones(len(shape), dtype=np.int64)
    for dimension, (part, length) in enumerate(zip(region.region, shape, strict=True)):
        linear = detect_linear_equation(part.min, list(loops))
        factors = [getattr(f, "value", None) for f in linear[:-1]] if len(linear) else [None]
        extent = getattr(part.extent, "value", None)
        if extent is None or any(f is None for f in factors):
            extents[dimension] = length
            continue
        extents[dimension] = extent
        strides[dimension] = [abs(int(f)) for f in factors if f is not None]
    element_bytes = max(1, DataType(str(region.source.dtype)).bits // 8)
    return Access(strides, extents, np.array(shape, dtype=np.int64), element_bytes)
