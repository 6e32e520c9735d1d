"""Products of bytes by AMX, which adds the product of two tiles of registers to a third one.

A tile is 16 rows of 64 bytes: 16 x 16 sums, or 16 rows of values and 64 of their depth, or 64 of
the depth of 16 columns of weights, which lie as VNNI reads them. Rows of a tile lie equally far
apart in memory. So the rows of sums are taken along a *line*: their last dimension, or the last
ones in one, where in memory each is a multiple of the next one. Between two rows of an image that
is padded the line has places of no output: their sums are computed and not stored. What does not
divide a line is computed twice, at its end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tunerd.candidates.nests.blocks import blocks_of, reduced_of, spatial_of
from tunerd.candidates.registers import sums as of_sums
from tunerd.candidates.registers.schedule import in_tiles
from tunerd.candidates.registers.sums import Sums
from tunerd.candidates.registers.units import distances
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule

ROWS, ROW_BYTES, TILES = 16, 64, 8  # of a tile, and of a core
_TILE_BYTES = ROWS * ROW_BYTES
# Cycles, as one Xeon core took them.
_PRODUCTS = 16.0  # of two tiles
_FROM_L1, _FROM_L2 = 8.0, 22.0  # to load a tile
_STORED = 16.0  # for a vector of sums: through memory, rescaled, rounded and stored
_BEGUN = 60.0  # for the sums of each step of the loops: zeroed, and what waits for the last ones


@dataclass(frozen=True, order=True)
class AmxCut:
    """How sums are cut."""

    merged: int  # how many of the last dimensions of the rows are a line
    height: int  # tiles of rows whose sums are in registers
    vectors: int  # and tiles of columns
    columns_outside: int  # as `Cut` has it


@dataclass(frozen=True)
class Line:
    """Rows equally far apart in memory."""

    extents: tuple[int, ...]  # of the dimensions that are merged
    padded: tuple[int, ...]  # the same, with what lies between: of the first one nothing
    row_bytes: int  # from one row to the next one

    @property
    def length(self) -> int:
        """The places from the first row to the last one."""
        last = 0
        for extent, padded in zip(self.extents, self.padded, strict=True):
            last = last * padded + extent - 1
        return last + 1

    def rows(self, height: int) -> int:
        """Return the rows of a tile, where so many tiles are computed at once: as few as fit."""
        return math.ceil(self.length / (self.steps(height) * height))

    def steps(self, height: int) -> int:
        """Return how often so many tiles are computed."""
        return math.ceil(self.length / (ROWS * height))


@dataclass(frozen=True)
class Amx:
    """A task whose sums are such products.

    sums: of VNNI's unit, whose weights these are.
    """

    sums: Sums
    row_bytes: tuple[int, ...]  # of each dimension of the rows: from what one reads to the next
    depth_bytes: tuple[int, ...]  # of each loop over taps, and over the depth: likewise

    @classmethod
    def of(cls, mod: IRModule, sums: Sums) -> Amx:
        """Read a task's module; raises ValueError where it is none. sums: of this module."""
        (block,) = (b for b, _ in blocks_of(mod["main"]) if str(b.name_hint) == sums.sums)
        rows, reduced = spatial_of(block)[:-1], reduced_of(block)
        found = distances(block, [*rows, *reduced])
        if not found or found[-1] != 1 or not rows or min(found) < 0:
            raise ValueError("what it reads of a row does not lie together")
        if any(sums.apart) or sums.groups > 1:
            raise ValueError("its rows have weights of their own")
        return cls(sums, tuple(found[: len(rows)]), tuple(found[len(rows) :]))

    @cached_property
    def together(self) -> int:
        """How many of the last loops over taps and depth are one: as few as make steps large."""
        every = range(1, len(self._depths) + 1)
        dense = [n for n in every if self._is_dense(n)]
        return max(dense, key=lambda n: (_largest_step(self._depths[-n:]), -n))

    @cached_property
    def depth(self) -> int:
        """The bytes of a row that a tile takes: they divide what lies together."""
        return _largest_step(self._depths[-self.together :])

    @property
    def _depths(self) -> tuple[int, ...]:
        return (*self.sums.taps, self.sums.depth)

    def _is_dense(self, count: int) -> bool:
        """Whether so many of the last loops read bytes that follow each other."""
        inside = 1
        last = zip(self._depths[::-1], self.depth_bytes[::-1], strict=True)
        for extent, apart in itertools.islice(last, count):
            if extent > 1 and apart != inside:
                return False
            inside *= extent
        return True

    def line(self, merged: int) -> Line:
        """Return the last dimensions of the rows as one; as many as `tiles` has."""
        apart = self.row_bytes[-merged:]
        extents = self.sums.rows[-merged:]
        between = (
            extent if own == 1 else far // near
            for own, extent, far, near in zip(extents, extents[1:], apart, apart[1:], strict=False)
        )
        return Line(extents, (extents[0], *between), apart[-1])

    def tiles(self) -> Iterator[AmxCut]:
        shapes = itertools.product(range(1, TILES), range(1, TILES))
        fitting = [(h, v) for h, v in shapes if h * v + h + v <= TILES]
        for merged in self._merged():
            line = self.line(merged)
            for height, vectors in fitting:
                if height * line.rows(height) > line.length or self.sums.vectors % vectors:
                    continue
                for outside in (0, 1):
                    yield AmxCut(merged, height, vectors, outside)

    def _merged(self) -> Iterator[int]:
        """Count dimensions that are a line: first the last one, and then those before it."""
        rows, apart = self.sums.rows, self.row_bytes
        yield 1
        for place in range(len(rows) - 1, 0, -1):
            near, far = apart[place], apart[place - 1]
            is_one = rows[place - 1] == 1
            if not is_one and (not near or far % near or far < near * rows[place]):
                return
            if not is_one or place == 1:  # else the same tiles
                yield len(rows) - place + 1

    def estimated_secs(self, cut: AmxCut, sms: float) -> float:
        """Return a rough time on the task's cores: what is computed, or what is loaded."""
        sums, line = self.sums, self.line(cut.merged)
        rows = line.rows(cut.height)
        cores = max(1, sums.cores)
        panels = sums.vectors // cut.vectors
        around = math.prod(sums.rows[: len(sums.rows) - cut.merged]) * line.steps(cut.height)
        steps = math.prod(self._depths) // self.depth
        panel = steps * cut.vectors * _TILE_BYTES * self.depth // ROW_BYTES  # of weights
        read = math.prod(sums.rows) * sums.depth  # for each panel, or once
        is_near = cut.columns_outside and panel <= of_sums.L1_BYTES
        of_rows = _FROM_L1 * rows / ROWS
        of_weights = (_FROM_L1 if is_near else _FROM_L2) * self.depth / ROW_BYTES
        step = max(
            _PRODUCTS * cut.vectors * max(1.0, cut.height * rows / ROWS),
            of_rows * cut.height + of_weights * cut.vectors,
        )
        vectors = cut.height * rows * cut.vectors
        times = math.ceil(around * panels / cores)  # of the core that ends last
        cycles = times * (steps * step + _STORED * vectors + _BEGUN)
        far = panel if cut.columns_outside else panel * panels
        loaded = times * panel / of_sums.L3_BYTES_PER_CYCLE if far > of_sums.L2_BYTES else 0.0
        if cut.columns_outside and read > of_sums.L2_BYTES:
            loaded += read * panels / cores / of_sums.L3_BYTES_PER_CYCLE
        return of_sums.overlapped(cycles, loaded) / of_sums.HERTZ

    def features(self, cut: AmxCut, sms: float) -> tuple[float, ...]:
        """Return as many as `Sums.features` does."""
        sums, rows = self.sums, self.line(cut.merged).rows(cut.height)
        sizes = (
            cut.height, rows, cut.vectors, cut.height * rows * cut.vectors,
            math.prod(sums.rows), sums.columns, sums.depth, math.prod(sums.taps),
            math.prod(self._depths) // self.depth,
        )  # fmt: skip
        secs = math.log2(self.estimated_secs(cut, sms))
        return (*map(math.log2, sizes), float(cut.columns_outside), 4.0, secs)

    def layouts(self, cut: AmxCut) -> tuple[tuple[int, Layout], ...]:
        """Return `LoweredKernel.layouts` of a cut: weights lie as they are."""
        return ()

    def scheduled(self, mod: IRModule, cut: AmxCut) -> IRModule:
        """Return the module with its loops cut; raises what TVM raises for what is no cut of it."""
        return in_tiles(mod, self, cut)


def _largest_step(extents: tuple[int, ...]) -> int:
    """Return the most bytes of a row of a tile that divide some loops in one, in fours."""
    whole = math.prod(extents)
    return max(size for size in range(4, ROW_BYTES + 1, 4) if whole % size == 0)
