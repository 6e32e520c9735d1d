"""A task's design space as numbers: sketches, their knobs, and what a choice amounts to.

TVM's rules make a few *sketches* of a task: traces whose sampling instructions are its *knobs*. A
*choice* sets every knob of a sketch. Applying a trace and checking it costs tens of milliseconds,
so that a search wants to know beforehand what a choice amounts to: threads, bytes of shared memory,
accumulators. All of it follows from the tile sizes and from how the tiled block reads its buffers,
and is computed here for thousands of choices at once.

A choice is a row of integers: a tile has a column for each of its parts, any other knob one column.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tunerd.candidates.metaschedule import cpu_estimate
from tunerd.candidates.metaschedule.access import MAX_READS, Access
from tunerd.candidates.metaschedule.gpu_estimate import Columns, Tiling, estimated_secs
from tunerd.candidates.metaschedule.knobs import UNDECIDED, Choices, Knob, Location, Option, Tile
from tunerd.candidates.metaschedule.tensor_cores import is_tensorized
from tunerd.candidates.metaschedule.traces import (
    TiledBlock,
    Trace,
    before_postprocessing,
    knobs_of,
    pipeline_copies,
    skeleton_of,
    tiled_block,
    unroll_knob,
)

FEATURES = 96  # that a cost model sees of a choice

_MAX_OPTIONS = 4  # knobs without parts that a cost model sees
_MAX_RAW = 12  # factors that it sees of a sketch without a tiled block
# Levels outside of what a block of threads keeps in shared memory: the grid, and the reduction's
# outermost loops.
_SHARED = (1, 1)
_GPU_LEVELS = "SSS"  # grid, virtual threads, threads
_VECTOR_BYTES = 64  # the widest of a CPU


@dataclass(frozen=True)
class Limits:
    """What a choice may amount to.

    All but the last are of a GPU's block of threads. Source: CUDA Programming Guide, compute
    capabilities.
    """

    min_threads: int = 32  # of a kernel with so many outputs
    max_threads: int = 1024
    shared_bytes: int = 49152
    # More accumulators than registers spill. Of 2,639 ResNet-50 kernels measured on an H200 none
    # with more than 112 came within 20% of its task's best, and they took a fifth of all builds.
    max_accumulators: int = 128
    # Vector operations that TVM writes out for a CPU. Of the 1,088 SqueezeNet kernels of
    # results/cpu-light_squeezenet-cpu50 7% had more, took 19% of the time of all builds, and none
    # came within 3% of its task's best.
    max_unrolled: int = 256


class Sketch:
    """One trace of the design space with its knobs open."""

    def __init__(
        self,
        index: int,
        trace: Trace,
        accesses: Mapping[str, list[Access]],
        sms: float | None,
    ) -> None:
        """Take what Design takes, of one trace."""
        self.index = index
        self._sms = sms
        self.instructions = before_postprocessing(trace[0])
        self.key = json.dumps(self.instructions)
        self.skeleton = skeleton_of(self.instructions)
        decided = dict(trace[1])
        self.knobs = knobs_of(self.instructions, decided)
        ends = np.cumsum([0, *(k.parts for k in self.knobs)]).tolist()
        self.width = int(ends[-1])
        self._columns = [slice(a, b) for a, b in itertools.pairwise(ends)]
        open_instructions = {k.instruction for k in self.knobs}
        self._fixed = {i: value for i, value in decided.items() if i not in open_instructions}
        self.copies = pipeline_copies(self.instructions)
        self._unroll = unroll_knob(self.instructions, self.knobs)
        self.is_tensorized = is_tensorized(self.instructions)
        self.block = tiled_block(self.instructions, self.knobs, accesses)
        if self.is_tensorized:  # whose loops are not those that the block has in the task
            self.block = None

    def sample(self, count: int, random: np.random.Generator) -> Choices:
        drawn = [knob.sample(count, random) for knob in self.knobs]
        return np.hstack(drawn) if drawn else np.zeros((count, 0), dtype=np.int64)

    def mutate(self, rows: Choices, random: np.random.Generator) -> Choices:
        """Change one knob of each row, a tile more often than anything else."""
        changed = rows.copy()
        if not self.knobs:
            return changed
        splits = [isinstance(k, Tile) and k.extent > 1 for k in self.knobs]
        weights = np.where(splits, 8.0, 1.0)
        picked = random.choice(len(self.knobs), size=len(rows), p=weights / weights.sum())
        for i, (knob, columns) in enumerate(self._knobs_and_columns()):
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

    def encode(self, trace: Trace) -> Choices:
        """Return the choice of a trace of this sketch, shape [width]."""
        decided = dict(trace[1])
        row = np.zeros(self.width, dtype=np.int64)
        for knob, columns in self._knobs_and_columns():
            row[columns] = decided[knob.instruction]
        return row

    def translate(self, trace: Trace) -> Choices | None:
        """Return the choice of a trace with the same steps, or None where it is not allowed."""
        instructions, decisions = trace
        decided = dict(decisions)
        row = np.zeros(self.width, dtype=np.int64)
        for knob, columns in self._knobs_and_columns():
            own = knob.translate(decided.get(knob.instruction), instructions[knob.instruction][2])
            if own is None:
                return None
            row[columns] = own
        return row

    def decode(self, row: Choices) -> Trace:
        """Return the trace's JSON of a choice; TVM decides what is undecided."""
        decided = dict(self._fixed)
        for knob, columns in self._knobs_and_columns():
            values = [int(v) for v in row[columns]]
            if values[0] != UNDECIDED:
                decided[knob.instruction] = values if isinstance(knob, Tile) else values[0]
        return self.instructions, [[i, decided[i]] for i in sorted(decided)]

    def tiles_of(self, row: Choices) -> Choices:
        """Return the part of a choice that says how loops are split."""
        split = [row[c] for knob, c in self._knobs_and_columns() if isinstance(knob, Tile)]
        return np.hstack(split) if split else row

    # --- what choices amount to ---------------------------------------------------------------

    @property
    def tiles_a_gpu(self) -> bool:
        """Whether its tiles say what a block of a GPU's threads uses."""
        return self.block is not None and self.block.structure.startswith(_GPU_LEVELS)

    def fits(self, rows: Choices, limits: Limits) -> npt.NDArray[np.bool_]:
        """Say which choices keep the limits, as far as they follow from the tiles."""
        tiling = self._tiling(rows)
        if tiling is None:
            return np.asarray(self._unrolled(rows) <= limits.max_unrolled)
        outputs = tiling.blocks * tiling.threads * tiling.accumulators
        least = np.where(outputs < limits.min_threads, 1, limits.min_threads)
        # A pipeline needs rounds; TVM refuses to make one of a loop with one.
        return np.asarray(
            ((self.copies == 1) | (tiling.rounds > 1))
            & (tiling.threads >= least)
            & (tiling.threads <= limits.max_threads)
            & (tiling.accumulators <= limits.max_accumulators)
            & (tiling.copies * tiling.loaded_bytes <= limits.shared_bytes)
        )

    def estimated_secs(self, rows: Choices) -> Columns:
        """Return a rough time of each choice, NaN where nothing is known.

        On a GPU on the share's SMs, on a CPU on one core.
        """
        on_cpu = self._cpu_tiling(rows)
        if on_cpu is not None:
            return cpu_estimate.estimated_secs(on_cpu)
        tiling = None if self._sms is None else self._tiling(rows)
        if tiling is None or self._sms is None:
            return np.full(len(rows), np.nan)
        return estimated_secs(tiling, self._sms)

    def features(self, rows: Choices) -> Columns:
        """Return what a cost model sees of choices, shape [choice, FEATURES].

        Sizes are logarithms to base 2, NaN is unknown. A column means the same in every sketch and
        task with the same tiling structure.
        """
        count = len(rows)
        options = []
        for knob, columns in self._knobs_and_columns():
            if isinstance(knob, Option):
                options.append(np.array(knob.values, dtype=float)[rows[:, columns.start]])
            elif isinstance(knob, Location):
                options.append(rows[:, columns.start].astype(float))
        seen = [np.full(count, float(self.index)), np.full(count, float(self.copies))]
        seen.append(np.log2(self.estimated_secs(rows)))
        seen += _padded(options, _MAX_OPTIONS, count)
        if self.block is None:
            seen += _padded([np.log2(c) for c in self._raw(rows).T], _MAX_RAW, count)
        else:
            seen += _padded([], _MAX_RAW, count)
            seen += self._tile_features(rows, self.block)
        return np.column_stack(_padded(seen, FEATURES, count))

    def _raw(self, rows: Choices) -> Choices:
        """Return the factors of a sketch without a tiled block, [choice, factor].

        On tensor cores without those of a loop that has one iteration, of which there may be many.
        """
        shown = np.ones(self.width, dtype=bool)
        for knob, columns in self._knobs_and_columns():
            shown[columns] = not (self.is_tensorized and getattr(knob, "extent", 2) == 1)
        return rows[:, shown].clip(1)

    def _tile_features(self, rows: Choices, block: TiledBlock) -> list[Columns]:
        """Return the factors by level, then for each level what its tile computes and touches."""
        count = len(rows)
        seen: list[Columns] = []
        for knobs, letter in ((block.spatial, "S"), (block.reduction, "R")):
            levels = block.structure.count(letter)
            factors = np.log2(self._factors(rows, knobs))  # [choice, loop, level]
            seen += _padded(list(factors.sum(axis=1).T), levels, count)
            for loop in (1, 2):  # from the innermost: they decide how memory is read
                own = list(factors[:, -loop, :].T) if len(knobs) >= loop else []
                seen += _padded(own, levels, count)
        for levels_outside in [_SHARED, *_cuts(block.structure)]:
            tile = self._inside(rows, *levels_outside)
            work = np.log2(tile).sum(axis=1)
            touched = [np.log2(a.tile_bytes(tile)) for a in block.accesses]
            intensity = work - np.log2(np.exp2(touched).sum(axis=0))
            seen += [*_padded(touched[:-1], MAX_READS, count), touched[-1], work, intensity]
        return seen

    def _tiling(self, rows: Choices) -> Tiling | None:
        """Return what choices of a tiled GPU kernel amount to."""
        block = self.block
        if block is None or not self.tiles_a_gpu:
            return None
        levels = self._factors(rows, block.spatial).transpose(2, 0, 1)  # [level, choice, loop]
        blocks, vthreads, threads, *inner = levels
        tile = self._inside(rows, *_SHARED)
        return Tiling(
            blocks=blocks.prod(axis=1),
            threads=threads.prod(axis=1),
            accumulators=np.prod([vthreads, *inner], axis=0).prod(axis=1),
            rounds=self._factors(rows, block.reduction)[:, :, 0].prod(axis=1),
            multiply_adds=tile.prod(axis=1),
            loaded_bytes=np.sum([a.tile_bytes(tile) for a in block.accesses[:-1]], axis=0),
            copies=self.copies,
        )

    def _cpu_tiling(self, rows: Choices) -> cpu_estimate.CpuTiling | None:
        """Return what choices of a tiled CPU kernel amount to."""
        block = self.block
        if block is None or block.structure != cpu_estimate.STRUCTURE:
            return None

        def touched(spatial_levels: int, reduction_levels: int) -> Columns:
            inside = self._inside(rows, spatial_levels, reduction_levels)
            return np.asarray(np.sum([a.tile_bytes(inside) for a in block.accesses], axis=0))

        return cpu_estimate.tiling_of(
            self._factors(rows, block.spatial),
            self._factors(rows, block.reduction),
            unroll_steps=self._unroll_steps(rows),
            touched=touched,
            lanes=_VECTOR_BYTES / block.accesses[-1].element_bytes,
        )

    def _unroll_steps(self, rows: Choices) -> Choices:
        """Return how many iterations TVM may write out, 0 where that is no knob."""
        if self._unroll is None:
            return np.zeros(len(rows), dtype=np.int64)
        place, knob = self._unroll
        return np.asarray(np.array(knob.values)[rows[:, self._columns[place].start]])

    def _unrolled(self, rows: Choices) -> Columns:
        """Return how many vector operations of a tiled CPU kernel TVM writes out, one by one.

        It unrolls loops from the inside, as long as all their iterations together keep to the step
        that the sketch's knob sets; the innermost becomes vectors.
        """
        block = self.block
        if block is None or self._unroll is None:
            return np.ones(len(rows))
        steps = self._unroll_steps(rows)
        outside_in: list[Choices] = []
        for i, letter in enumerate(block.structure):
            level = block.structure[:i].count(letter)
            tiles = block.spatial if letter == "S" else block.reduction
            outside_in += [rows[:, self._columns[tile]][:, level] for tile in tiles]
        lanes = _VECTOR_BYTES / block.accesses[-1].element_bytes
        vectors = np.ceil(outside_in.pop() / lanes)
        iterations = np.cumprod(outside_in[::-1], axis=0)
        return np.asarray(vectors * np.where(iterations <= steps, iterations, 1).max(axis=0))

    def _knobs_and_columns(self) -> Iterable[tuple[Knob, slice]]:
        return zip(self.knobs, self._columns, strict=True)

    def _factors(self, rows: Choices, knobs: Sequence[int]) -> Columns:
        """Return the factors of some tiles, shape [choice, loop, level]."""
        if not knobs:
            return np.ones((len(rows), 1, 1))
        return np.stack([rows[:, self._columns[k]] for k in knobs], axis=1).astype(float)

    def _inside(self, rows: Choices, spatial: int, reduction: int) -> Columns:
        """Return each loop's iterations inside of its first so many levels, [choice, loop]."""
        assert self.block is not None
        by_knob = {
            knob: rows[:, self._columns[knob]][:, levels:].prod(axis=1)
            for knobs, levels in ((self.block.spatial, spatial), (self.block.reduction, reduction))
            for knob in knobs
        }
        return np.column_stack([by_knob[k] for k in sorted(by_knob)]).astype(float)


class Design:
    """All sketches of a task, and how to find a trace's own among them."""

    def __init__(
        self,
        traces: Sequence[Trace],
        accesses: Mapping[str, list[Access]],
        *,
        sms: float | None = None,
    ) -> None:
        """Take the sketches' traces as JSON, and what the task's blocks access, by their names.

        sms: of the share of a GPU that is tuned for.
        """
        self.sketches = [Sketch(i, trace, accesses, sms) for i, trace in enumerate(traces)]
        self._by_key = {s.key: s for s in self.sketches}
        self._by_skeleton = {s.skeleton: s for s in reversed(self.sketches)}

    def find(self, trace: Trace) -> Sketch | None:
        """Return the sketch of a trace, or None: other rules made it."""
        return self._by_key.get(json.dumps(before_postprocessing(trace[0])))

    def translate(self, trace: Trace) -> tuple[Sketch, Choices] | None:
        """Return what a trace of another target or of earlier rules decides, as a choice here.

        None where no sketch has the same steps, or its sketch does not allow what was decided.
        """
        sketch = self.find(trace)
        if sketch is None:
            sketch = self._by_skeleton.get(skeleton_of(before_postprocessing(trace[0])))
        row = None if sketch is None else sketch.translate(trace)
        return None if sketch is None or row is None else (sketch, row)


def _cuts(structure: str) -> list[tuple[int, int]]:
    """Return for each place between two levels the spatial and reduction levels before it."""
    before = [structure[:i] for i in range(1, len(structure))]
    return [(b.count("S"), b.count("R")) for b in before]


def _padded(columns: Sequence[Columns], width: int, count: int) -> list[Columns]:
    unknown = np.full(count, np.nan)
    return [*columns, *[unknown] * (width - len(columns))][:width]
