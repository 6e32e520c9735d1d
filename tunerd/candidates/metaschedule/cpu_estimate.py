"""How long a tiled CPU kernel may take on one core, from its tiling alone.

Counts what a core issues: multiply-adds of vectors, the loads that feed them, and what is left in
no register and no cache (Goto and van de Geijn, "Anatomy of High-Performance Matrix
Multiplication", ACM TOMS 2008). Good for ranks only: it knows one kind of core, and guesses what
LLVM makes of loops that TVM leaves to it. Its constants were chosen by kernels of a ResNet-50, a
SqueezeNet and a transformer encoder on a Zen 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.candidates.metaschedule.gpu_estimate import Columns

STRUCTURE = "SSRSRS"  # of the kernels that it knows: levels of loops, outermost first

_REGISTERS = 28  # of 32, for accumulators
_SPILL = 16.0  # cycles for each one more, in each round
_LATENCY = 4.0  # cycles until a multiply-add's result is there
_WINDOW = 256.0  # operations that a core looks ahead, into the next tiles
_L1_BYTES, _L2_BYTES = 32 << 10, 1 << 20
_L2_BYTES_PER_CYCLE, _L3_BYTES_PER_CYCLE = 64.0, 16.0
_HERTZ = 3.5e9
_WRITTEN_OUT = 48  # operations of a tile that LLVM unrolls by itself
_STREAMED = 128  # multiply-adds up to which LLVM makes vectors of the loop around them


@dataclass(frozen=True)
class CpuTiling:
    """What choices of a kernel's tiles amount to; each field has the shape [choice].

    A tile of registers is what the innermost level computes, again and again: its rounds.
    """

    tiles: Columns  # that are begun
    rounds: Columns  # of each, one after the other
    vector: Columns  # elements of the innermost loop, which TVM makes vectors of
    others: Columns  # iterations of the tile's other loops
    around: Columns  # iterations of the next loop outside that goes along the vector
    is_wide: npt.NDArray[np.bool_]  # whether the rounds are the reduction's outer loops
    is_unrolled: npt.NDArray[np.bool_]  # whether TVM writes the rounds out
    tile_bytes: Columns  # that a tile touches in its rounds
    blocks: Columns  # that are begun: of tiles that share a part of the reduction
    block_bytes: Columns
    panel_bytes: Columns  # the same with the reduction's outer loops
    lanes: float  # elements of a vector register


def tiling_of(
    spatial: Columns,
    reduction: Columns,
    *,
    unroll_steps: npt.NDArray[np.int64],
    touched: Callable[[int, int], Columns],
    lanes: float,
) -> CpuTiling:
    """Work out the tiling of kernels with STRUCTURE.

    Args:
        spatial: factors of the spatial loops, shape [choice, loop, 4].
        reduction: of the reduction loops, shape [choice, loop, 2], or [choice, 1, 1] without any.
        unroll_steps: iterations that TVM may write out.
        touched: bytes inside of so many levels of spatial and of reduction loops.
    """
    around, tile = spatial[:, :, 2], spatial[:, :, 3]
    begun = spatial[:, :, :2].prod(axis=(1, 2))
    steps, rounds = np.broadcast_to(reduction.prod(axis=1), (len(spatial), 2)).T
    # Without rounds of its own a tile reaches out to the reduction's outer loop.
    is_wide = rounds == 1
    others = tile[:, :-1].prod(axis=1) * np.where(is_wide, around.prod(axis=1), 1)
    return CpuTiling(
        tiles=begun * np.where(is_wide, 1, steps * around.prod(axis=1)),
        rounds=np.where(is_wide, steps, rounds),
        vector=tile[:, -1],
        others=others,
        around=np.where(is_wide, 1, around[:, -1]),
        is_wide=is_wide,
        is_unrolled=rounds * others <= unroll_steps,
        tile_bytes=touched(3, 1),
        blocks=begun * steps,
        block_bytes=touched(2, 1),
        panel_bytes=touched(2, 0),
        lanes=lanes,
    )


def estimated_secs(tiling: CpuTiling) -> Columns:
    """Return a rough time of each choice on one core, shape [choice]."""
    vectors = _vectors(tiling.vector, tiling.lanes)
    ops = tiling.others * vectors
    tiles_ahead = np.maximum(1.0, _WINDOW / (2.0 * tiling.rounds * ops))
    a_round = np.maximum.reduce([ops, 0.5 * (tiling.others + vectors), _LATENCY / tiles_ahead])
    a_round += _SPILL * np.maximum(0.0, ops - _REGISTERS)
    in_registers = tiling.is_unrolled | (ops <= _WRITTEN_OUT)
    a_round = np.where(in_registers, a_round, 3.0 * ops) * np.where(tiling.is_wide, 2.0, 1.0)
    cycles = tiling.tiles * (tiling.rounds * a_round + 2.0 * ops + 1.0)

    # Where TVM makes no vectors, LLVM does of the loop around, if what is in it is small.
    multiply_adds = tiling.rounds * tiling.others
    is_streamed = (tiling.vector == 1) & (tiling.around > 1) & (multiply_adds <= _STREAMED)
    at_once = np.minimum(tiling.around, tiling.lanes)
    streaming = tiling.tiles / at_once * (2.0 * multiply_adds + 3.0)
    cycles = np.where(is_streamed, streaming, cycles)

    from_l2 = np.where(tiling.block_bytes > _L1_BYTES, tiling.tiles * tiling.tile_bytes, 0.0)
    is_far = tiling.panel_bytes > _L2_BYTES
    bandwidth = np.where(is_far, _L3_BYTES_PER_CYCLE, _L2_BYTES_PER_CYCLE)
    loading = from_l2 / _L2_BYTES_PER_CYCLE + tiling.blocks * tiling.block_bytes / bandwidth
    return np.asarray(np.maximum(cycles, loading) / _HERTZ)


def _vectors(elements: Columns, lanes: float) -> Columns:
    """Return the operations on so many elements: whole vectors, then halves, quarters and so on."""
    whole, rest = np.divmod(elements, lanes)
    found, width = whole, lanes
    while width > 1:
        width /= 2
        fits = rest >= width
        found, rest = found + fits, rest - fits * width
    return np.asarray(np.maximum(found, 1.0))
