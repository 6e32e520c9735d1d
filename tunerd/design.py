"""A task's design space as numbers: sketches, their knobs, and what a choice amounts to.

TVM's rules make a few *sketches* of a task: traces whose sampling instructions are its *knobs*. A
*choice* sets every knob of a sketch. Applying a trace and checking it costs tens of milliseconds,
so that a search wants to know beforehand what a choice amounts to: threads, bytes of shared memory,
accumulators. All of it follows from the tile sizes and from how the tiled block reads its buffers,
and is computed here for thousands of choices at once.

A choice is a row of integers: a tile has a column for each of its parts, any other knob one column.
A trace's JSON is TVM's: a list of instructions [kind, inputs, attributes, outputs], and a list of
decisions [index, value]. Everything from the instruction EnterPostproc on follows from the rest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tvm.ir import IRModule

Choices = npt.NDArray[np.int64]
Columns = npt.NDArray[np.float64]

FEATURES = 96  # that a cost model sees of a choice
UNDECIDED = -99  # a compute location that TVM draws when it applies the trace

_MAX_READS = 3  # buffers of a block that are told apart
_MAX_OPTIONS = 4  # knobs without parts that a cost model sees
_MAX_RAW = 12  # factors that it sees of a sketch without a tiled block
_MAX_DRAWS = 20
# Levels outside of what a block of threads keeps in shared memory: the grid, and the reduction's
# outermost loops.
_SHARED = (1, 1)


@dataclass(frozen=True)
class Tile:
    """Splits a loop of `extent` iterations into `parts` factors, outermost first."""

    instruction: int
    extent: int
    parts: int
    max_innermost: int

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        """Draw uniformly from the splits whose last factor is allowed."""
        drawn = np.ones((count, self.parts), dtype=np.int64)
        drawn[:, 0] = self.extent
        rows = np.arange(count)
        for _ in range(_MAX_DRAWS):
            fresh = np.ones((len(rows), self.parts), dtype=np.int64)
            for prime, power in _factorized(self.extent):
                table = prime ** _compositions(power, self.parts)
                fresh *= table[random.integers(len(table), size=len(rows))]
            good = fresh[:, -1] <= self.max_innermost
            drawn[rows[good]] = fresh[good]
            rows = rows[~good]
            if not len(rows):
                break
        return drawn

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        """Move a prime factor from one part to another, where that is allowed."""
        if self.extent == 1 or self.parts == 1:
            return rows
        count = len(rows)
        primes = np.array([p for p, _ in _factorized(self.extent)])
        prime = primes[random.integers(len(primes), size=count)]
        source = random.integers(self.parts, size=count)
        target = (source + random.integers(1, self.parts, size=count)) % self.parts
        at = np.arange(count)
        changed = rows.copy()
        changed[at, source] //= prime
        changed[at, target] *= prime
        good = (rows[at, source] % prime == 0) & (changed[:, -1] <= self.max_innermost)
        return np.where(good[:, None], changed, rows)


@dataclass(frozen=True)
class Option:
    """Picks one of `values` by its index."""

    instruction: int
    values: tuple[int, ...]
    parts: int = 1

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        return random.integers(len(self.values), size=(count, 1))

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        return self.sample(len(rows), random)


@dataclass(frozen=True)
class Location:
    """Says at which loop a block is computed; what is possible shows when a trace is applied."""

    instruction: int
    parts: int = 1

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        return np.full((count, 1), UNDECIDED)

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        return self.sample(len(rows), random)


Knob = Tile | Option | Location


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

    def tile_bytes(self, tile: Columns) -> Columns:
        """Return the bytes that tiles touch; `tile` is [choice, loop]."""
        touched = (tile - 1) @ self.strides.T + self.extents
        return np.asarray(np.minimum(touched, self.shape).prod(axis=1) * self.element_bytes)


@dataclass(frozen=True)
class TiledBlock:
    """The block that a sketch tiles: its loops' kinds, and what it reads and writes."""

    structure: str  # such as SSSRRSRS: levels of spatial and reduction loops, outermost first
    spatial: tuple[int, ...]  # positions of its tiles in the sketch's knobs
    reduction: tuple[int, ...]
    accesses: tuple[Access, ...]  # reads first, the write last


@dataclass(frozen=True)
class Limits:
    """What a block of threads may use. Source: CUDA Programming Guide, compute capabilities."""

    min_threads: int = 32
    max_threads: int = 1024
    shared_bytes: int = 49152
    # More accumulators than registers spill. Of 2,639 ResNet-50 kernels measured on an H200 none
    # with more than 112 came within 20% of its task's best, and they took a fifth of all builds.
    max_accumulators: int = 128


class Sketch:
    """One trace of the design space with its knobs open."""

    def __init__(
        self, index: int, trace: tuple[list[Any], list[Any]], accesses: Mapping[str, list[Access]]
    ) -> None:
        """Take a trace's JSON, and the accesses of the blocks that it may tile by their names."""
        self.index = index
        self.instructions = _before_postprocessing(trace[0])
        decided = dict(trace[1])
        self.knobs: list[Knob] = []
        for i, (kind, _, attributes, _) in enumerate(self.instructions):
            if kind == "SamplePerfectTile":
                parts, innermost = attributes
                self.knobs.append(Tile(i, int(np.prod(decided[i])), parts, innermost))
            elif kind == "SampleCategorical":
                self.knobs.append(Option(i, tuple(attributes[0])))
            elif kind == "SampleComputeLocation":
                self.knobs.append(Location(i))
        ends = np.cumsum([k.parts for k in self.knobs], dtype=int)
        self.width = int(ends[-1]) if len(ends) else 0
        self._columns = [slice(end - k.parts, end) for k, end in zip(self.knobs, ends, strict=True)]
        self._fixed = {
            i: value for i, value in decided.items() if i not in {k.instruction for k in self.knobs}
        }
        self.key = json.dumps(self.instructions)
        # A pipelined loop keeps a copy of its shared buffers for each stage under way.
        self.copies = 1 + max(
            (max(inputs[1]) for kind, inputs, attributes, _ in self.instructions
             if kind == "Annotate" and attributes == ["software_pipeline_stage"]),
            default=0,
        )  # fmt: skip
        self.block = self._tiled_block(accesses)

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        drawn = [knob.sample(count, random) for knob in self.knobs]
        return np.hstack(drawn) if drawn else np.zeros((count, 0), dtype=np.int64)

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        """Change one knob of each row; a tile more often than anything else."""
        changed = rows.copy()
        if not self.knobs:
            return changed
        weights = np.array([8.0 if isinstance(k, Tile) and k.extent > 1 else 1.0
                            for k in self.knobs])  # fmt: skip
        picked = random.choice(len(self.knobs), size=len(rows), p=weights / weights.sum())
        for i, (knob, columns) in enumerate(zip(self.knobs, self._columns, strict=True)):
            mine = np.flatnonzero(picked == i)
            if len(mine):
                changed[mine, columns] = knob.mutate(rows[mine, columns], random)
        return changed

    def cross(self, first: Choices, second: Choices, random: np.random.Generator) -> Choices:
        """Take each knob from one of two parents."""
        child = first.copy()
        for columns in self._columns:
            other = random.random(len(first)) < 0.5
            child[other, columns] = second[other, columns]
        return child

    def encode(self, trace: tuple[list[Any], list[Any]]) -> Choices:
        """Return the choice of a trace of this sketch, shape [width]."""
        decided = dict(trace[1])
        row = np.zeros(self.width, dtype=np.int64)
        for knob, columns in zip(self.knobs, self._columns, strict=True):
            row[columns] = decided[knob.instruction]
        return row

    def decode(self, row: Choices) -> tuple[list[Any], list[Any]]:
        """Return the trace's JSON of a choice; TVM decides what is undecided."""
        decided = dict(self._fixed)
        for knob, columns in zip(self.knobs, self._columns, strict=True):
            values = [int(v) for v in row[columns]]
            if values[0] != UNDECIDED:
                decided[knob.instruction] = values if isinstance(knob, Tile) else values[0]
        return self.instructions, [[i, decided[i]] for i in sorted(decided)]

    def tiles_of(self, row: Choices) -> Choices:
        """Return the part of a choice that says how loops are split."""
        split = [row[c] for k, c in zip(self.knobs, self._columns, strict=True)
                 if isinstance(k, Tile)]  # fmt: skip
        return np.hstack(split) if split else row

    # --- what choices amount to ---------------------------------------------------------------

    def fits(self, rows: Choices, limits: Limits) -> npt.NDArray[np.bool_]:
        """Say which choices keep a GPU's limits, as far as they follow from the tiles."""
        block = self.block
        if block is None or not block.structure.startswith("SSSR"):
            return np.ones(len(rows), dtype=bool)
        spatial = self._tiles(rows, block.spatial)  # [choice, loop, level]
        threads = spatial[:, :, 2].prod(axis=1)
        accumulators = (spatial[:, :, 1] * spatial[:, :, 3:].prod(axis=2)).prod(axis=1)
        tile = self._inside(rows, *_SHARED)
        shared = sum(a.tile_bytes(tile) for a in block.accesses[:-1])
        return np.asarray(
            (threads >= limits.min_threads)
            & (threads <= limits.max_threads)
            & (accumulators <= limits.max_accumulators)
            & (self.copies * shared <= limits.shared_bytes)
        )

    def features(self, rows: Choices) -> Columns:
        """Return what a cost model sees of choices, shape [choice, FEATURES].

        Sizes are logarithms to base 2, NaN is unknown. A column means the same in every sketch and
        task with the same tiling structure.
        """
        count = len(rows)
        columns: list[Columns] = [np.full(count, float(self.index)), np.full(count, self.copies)]
        options: list[Columns] = []
        for knob, part in zip(self.knobs, self._columns, strict=True):
            if isinstance(knob, Option):
                options.append(np.array(knob.values, dtype=float)[rows[:, part.start]])
            elif isinstance(knob, Location):
                options.append(rows[:, part.start].astype(float))
        missing = np.full(count, np.nan)
        columns += [*options, *[missing] * _MAX_OPTIONS][:_MAX_OPTIONS]
        if self.block is None:
            columns += [np.log2(rows[:, c].clip(1)) for c in range(min(self.width, _MAX_RAW))]
        else:
            columns += [missing] * _MAX_RAW
            columns += self._tile_features(rows, self.block)
        columns += [missing] * (FEATURES - len(columns))
        return np.column_stack(columns[:FEATURES])

    def _tile_features(self, rows: Choices, block: TiledBlock) -> list[Columns]:
        columns: list[Columns] = []
        spatial = self._tiles(rows, block.spatial)
        reduction = self._tiles(rows, block.reduction)
        for tiles in (spatial, reduction):
            levels = np.log2(tiles)
            columns += list(levels.sum(axis=1).T)  # all loops of a level
            for loop in (-1, -2):  # the innermost loops decide how memory is read
                if tiles.shape[1] >= -loop:
                    columns += list(levels[:, loop, :].T)
                else:
                    columns += [np.full(len(rows), np.nan)] * tiles.shape[2]
        structure = block.structure
        outside = [(structure[:d].count("S"), structure[:d].count("R")) for d in
                   range(1, len(structure))]  # fmt: skip
        for levels_outside in [_SHARED, *outside]:
            tile = self._inside(rows, *levels_outside)
            work = np.log2(tile).sum(axis=1)
            touched = [np.log2(a.tile_bytes(tile)) for a in block.accesses]
            reads = [*touched[:-1], *[np.full(len(rows), np.nan)] * _MAX_READS][:_MAX_READS]
            total = np.log2(sum(2.0**t for t in touched))
            columns += [*reads, touched[-1], work, work - total]
        return columns

    def _tiles(self, rows: Choices, knobs: Sequence[int]) -> Columns:
        """Return the factors of some tiles, shape [choice, loop, level]."""
        parts = self.knobs[knobs[0]].parts if knobs else 1
        if not knobs:
            return np.ones((len(rows), 1, parts))
        return np.stack([rows[:, self._columns[k]] for k in knobs], axis=1).astype(float)

    def _inside(self, rows: Choices, spatial: int, reduction: int) -> Columns:
        """Return each loop's iterations inside of its first so many levels, [choice, loop]."""
        block = self.block
        assert block is not None
        inside = np.ones((len(rows), len(block.spatial) + len(block.reduction)))
        for knobs, levels in ((block.spatial, spatial), (block.reduction, reduction)):
            if knobs:
                factors = self._tiles(rows, knobs)[:, :, levels:]
                inside[:, self._loop_order(knobs)] = factors.prod(axis=2)
        return inside

    def _loop_order(self, knobs: Sequence[int]) -> list[int]:
        """Return the loops' positions in the block, whose tiles come in the same order."""
        assert self.block is not None
        every = sorted((*self.block.spatial, *self.block.reduction))
        return [every.index(k) for k in knobs]

    def _tiled_block(self, accesses: Mapping[str, list[Access]]) -> TiledBlock | None:
        blocks: dict[str, str] = {}
        structure, tiled = "", ""
        for kind, inputs, attributes, outputs in self.instructions:
            if kind == "GetSBlock":
                blocks[outputs[0]] = attributes[0]
            elif kind == "Annotate" and attributes == ["meta_schedule.tiling_structure"]:
                structure, tiled = json.loads(inputs[1]), blocks.get(inputs[0], "")
        levels = {"S": structure.count("S"), "R": structure.count("R")}
        spatial = tuple(i for i, k in enumerate(self.knobs)
                        if isinstance(k, Tile) and k.parts == levels["S"])  # fmt: skip
        reduction = tuple(i for i, k in enumerate(self.knobs)
                          if isinstance(k, Tile) and k.parts == levels["R"])  # fmt: skip
        known = accesses.get(tiled)
        loops = known[-1].strides.shape[1] if known else -1
        if not spatial or loops != len(spatial) + len(reduction) or levels["S"] == levels["R"]:
            return None
        assert known is not None
        return TiledBlock(structure, spatial, reduction, tuple(known))


class Design:
    """All sketches of a task, and how to find a trace's own among them."""

    def __init__(self, mod: IRModule, traces: Sequence[tuple[list[Any], list[Any]]]) -> None:
        accesses = accesses_of(mod)
        self.sketches = [Sketch(i, trace, accesses) for i, trace in enumerate(traces)]
        self._by_key = {s.key: s for s in self.sketches}

    def find(self, trace: tuple[list[Any], list[Any]]) -> Sketch | None:
        """Return the sketch of a trace, or None: other rules made it."""
        return self._by_key.get(json.dumps(_before_postprocessing(trace[0])))


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
        regions = [*reads[:_MAX_READS], *list(block.writes)[:1]]
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


def _before_postprocessing(instructions: Sequence[Any]) -> list[Any]:
    kinds = [i[0] for i in instructions]
    return list(instructions[: kinds.index("EnterPostproc")] if "EnterPostproc" in kinds
                else instructions)  # fmt: skip


@functools.cache
def _factorized(number: int) -> tuple[tuple[int, int], ...]:
    """Return the primes of a number and their powers."""
    found, divisor = [], 2
    while number > 1:
        power = 0
        while number % divisor == 0:
            number //= divisor
            power += 1
        if power:
            found.append((divisor, power))
        divisor = divisor + 1 if divisor * divisor <= number else max(number, divisor + 1)
    return tuple(found)


@functools.cache
def _compositions(total: int, parts: int) -> Choices:
    """Return all ways to write `total` as an ordered sum of `parts`, shape [ways, parts]."""
    if parts == 1:
        return np.array([[total]], dtype=np.int64)
    rows = []
    for first in range(total + 1):
        rest = _compositions(total - first, parts - 1)
        rows.append(np.hstack([np.full((len(rest), 1), first), rest]))
    return np.vstack(rows)
