"""Ways to write a matrix product's kernel: tunerd's template in Triton, and variants of its text.

template                what tunerd compiles
order                   blocks take their tiles in another order
tma                     operands come by the bulk copy engine (TMA), from descriptors that the
                        host makes
persistent              as many blocks as fit, each of which goes over several tiles
persistent tma          both
specialised             as tma, with warps that only load and others that only multiply
persistent specialised  all of it
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tunerd.candidates.nests.nest import Axis, Expr, Nest, Reduction, Tensor, axis_expr, cast, flat
from tunerd.candidates.triton import product_code
from tunerd.candidates.triton.code import POINTERS, kernel_text
from tunerd.candidates.triton.product import Product, Tile
from tunerd.candidates.triton.product_code import ProductCode

KINDS = (
    "template",
    "order",
    "tma",
    "persistent",
    "persistent tma",
    "specialised",
    "persistent specialised",
)
ARCH = "sm_90a"
NAME = "product"
NAMED = (  # of which each is tried, whatever the estimate says
    (64, 256, 64),
    (128, 128, 64),
    (128, 256, 64),
    (64, 128, 128),
    (64, 128, 64),
    (64, 64, 128),
    (64, 64, 64),
)
_GROUPS = (1, 64)  # rows of tiles whose blocks come together; the template has 4
_BUILD_SECS = 60.0


@dataclass(frozen=True, order=True)
class Shape:
    """Of a product [rows, depth] x [depth, columns] in fp16, summed in fp32."""

    rows: int
    columns: int
    depth: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.depth}"

    def product(self) -> Product:
        """Return it as the template has it, with weights on the right and no epilogue."""
        row, column, deep = (
            Axis(name, extent)
            for name, extent in (("o0", self.rows), ("o1", self.columns), ("r0_0", self.depth))
        )
        at = {axis: axis_expr(axis) for axis in (row, column, deep)}
        tensors = tuple(
            Tensor(tuple(a.extent for a in axes), "float16")
            for axes in ((row, deep), (deep, column), (row, column))
        )

        def operand(number: int, *axes: Axis) -> Expr:
            place = flat(tuple(at[a] for a in axes), tensors[number].strides)
            return cast(Expr("load", (place,), number, "float16"), "float32")

        value = Expr("mul", (operand(0, row, deep), operand(1, deep, column)), dtype="float32")
        total = Expr("reduced", value=0, dtype="float32")
        nest = Nest(
            tensors,
            (row, column),
            flat((at[row], at[column]), tensors[2].strides),
            cast(total, "float16"),
            (Reduction("add", (deep,), 0.0, value),),
        )
        return Product.of(nest, "fp16", (1,))


@dataclass(frozen=True)
class Variant:
    """One way to write a product's kernel."""

    kind: str
    tile: Tile
    group: int = product_code._GROUP
    is_flat: bool = False  # the loops over tiles and over depth are one, which Triton pipelines

    @property
    def is_persistent(self) -> bool:
        return self.kind.startswith("persistent")

    @property
    def is_specialised(self) -> bool:
        return self.kind.endswith("specialised")

    @property
    def has_descriptors(self) -> bool:
        return self.is_specialised or self.kind.endswith("tma")

    @property
    def cut(self) -> str:
        """The cut in a word: tile, splits, warps, stages, and what else differs."""
        t = self.tile
        parts = [f"{t.rows}x{t.columns}x{t.depth}", f"k{t.splits}", f"w{t.warps}", f"s{t.stages}"]
        if self.group != product_code._GROUP:
            parts.append(f"g{self.group}")
        return " ".join([*parts, *(["flat"] if self.is_flat else [])])


@dataclass(frozen=True)
class Code(ProductCode):
    """The template's code of a product, with what a variant changes."""

    variant: Variant

    def text(self, name: str) -> str:
        variant, tiles = self.variant, self._tiles[0] * self._tiles[1]
        params = [f"p{i}" for i in range(len(self.product.nest.params))]
        if self.tile.splits > 1:
            params += ["counters", "workspace"]
        with mock.patch.object(product_code, "_GROUP", variant.group):
            pid, split, *begin = self._begin()
        loop = self._loop()
        if variant.kind == "specialised":
            loop = [
                line.replace("range(begin, end)", "tl.range(begin, end, warp_specialize=True)")
                for line in loop
            ]
        lines = [*begin, *loop, *self._end()]
        if not variant.is_persistent:
            return kernel_text(name, params, [pid, split, *lines])
        how = ", flatten=True" if variant.is_flat else ""
        how += ", warp_specialize=True" if variant.is_specialised else ""
        work = f"tl.range(tl.program_id(0), {tiles * self.tile.splits}, tl.num_programs(0){how})"
        lines = [f"pid = work % {tiles}", f"split = work // {tiles}", *lines]
        return kernel_text(name, params, [f"for work in {work}:", *(f"    {x}" for x in lines)])

    def _operand(
        self,
        name: str,
        operand: Expr,
        own: dict[Axis, str],
        depth: dict[Axis, str],
        loading: str = "",
    ) -> tuple[str, list[str]]:
        if not self.variant.has_descriptors:
            return super()._operand(name, operand, own, depth, loading)
        k = f"kt * {self.tile.depth}"
        if name == "left":
            return f"p0.load([tile_m * {self.tile.rows}, {k}])", []
        return f"p1.load([{k}, tile_n * {self.tile.columns}])", []


@dataclass(frozen=True)
class Kernel:
    """What is compiled, and the work that a launch of it has."""

    text: str
    types: tuple[str, ...]  # Triton's
    warps: int
    stages: int
    works: int  # tiles times splits
    splits: int
    workspace: int  # values
    is_persistent: bool

    @staticmethod
    def of(product: Product, variant: Variant) -> Kernel:
        tile = variant.tile
        types = [POINTERS["float16"]] * 3
        if variant.has_descriptors:
            types[0] = f"tensordesc<fp16[{tile.rows}, {tile.depth}]>"
            types[1] = f"tensordesc<fp16[{tile.depth}, {tile.columns}]>"
        if tile.splits > 1:
            types += [POINTERS["int32"], POINTERS["float32"]]
        text = Code(product, tile, variant).text(NAME)
        across, splits, _ = product.grid(tile)
        works = across * splits
        space = product.workspace(tile)
        persists = variant.is_persistent
        return Kernel(text, tuple(types), tile.warps, tile.stages, works, splits, space, persists)

    @property
    def key(self) -> str:
        """What it is built of, in short: the name of its files."""
        whole = "\n".join([self.text, *self.types, f"{self.warps} {self.stages}"])
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


# --- what is tried -----------------------------------------------------------------------------


def tried(product: Product, sms: int, count: int) -> Iterator[Variant]:
    """Yield the variants of a product: of each kind by the same cuts, where it can be of them."""
    cuts = _cuts(product, sms, count)
    for tile in cuts:
        yield Variant("template", tile)
        yield Variant("tma", tile)
    for tile in dict.fromkeys(_specialised(t) for t in cuts if _can_specialise(t)):
        yield Variant("specialised", tile)
    whole = [t for t in cuts if t.splits == 1]
    high = [t for t in whole if product.rows > product_code._GROUP * t.rows][:3]
    for tile in high:
        for group in _GROUPS:
            yield Variant("order", tile, group)
    waves = [t for t in whole if product.grid(t)[0] > sms][:6]
    for tile in waves:
        for is_flat in (False, True):
            yield Variant("persistent", tile, is_flat=is_flat)
            yield Variant("persistent tma", tile, is_flat=is_flat)
    for tile in dict.fromkeys(_specialised(t) for t in waves if _can_specialise(t)):
        yield Variant("persistent specialised", tile)


def _can_specialise(tile: Tile) -> bool:
    """Whether Triton 3.6 can give the rows or the columns of a tile to two groups of warps."""
    return tile.rows >= 128 or (tile.rows == 64 and tile.columns <= 128)


def _specialised(tile: Tile) -> Tile:
    """Return a cut as these kernels have it: Triton adds 8 warps, and keeps the sums' place."""
    return replace(tile, warps=4, stages=min(tile.stages, 4) if tile.splits > 1 else tile.stages)


def _cuts(product: Product, sms: int, count: int) -> list[Tile]:
    """Return the template's best by its own estimate, two of each tile, and those named."""

    def rank(tile: Tile) -> tuple[float, int]:
        return product.estimated_secs(tile, sms), -tile.stages

    def tile_of(tile: Tile) -> tuple[int, int, int]:
        return tile.rows, tile.columns, tile.depth

    chosen: list[Tile] = []
    ranked = sorted(product.tiles(), key=rank)
    for tile in ranked:
        alike = [c for c in chosen if tile_of(c) == tile_of(tile)]
        is_new = all(replace(c, stages=tile.stages) != tile for c in alike)
        if len(alike) < 2 and is_new and len(chosen) < count:
            chosen.append(tile)
    for named in NAMED:
        if named not in map(tile_of, chosen):
            chosen += [t for t in ranked if tile_of(t) == named][:1]
    return sorted(chosen, key=rank)


# --- compiling ---------------------------------------------------------------------------------


def build_all(kernels: Iterable[Kernel], folder: Path, workers: int) -> float:
    """Compile what is not in the folder, each kernel in a process of its own; return the seconds.

    A kernel has KEY.json, and KEY.cubin where that says no problem.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.tensor_cores.product_variants", "triton"])
    missing = {k.key: k for k in kernels if not (folder / f"{k.key}.json").exists()}

    def in_a_process(kernel: Kernel) -> None:
        process = context.Process(target=_build, args=(kernel, folder))
        process.start()
        process.join(_BUILD_SECS)
        if process.is_alive():
            process.kill()
            process.join()
        place = folder / f"{kernel.key}.json"
        if not place.exists():
            place.write_text(json.dumps({"problem": f"the compiler ended ({process.exitcode})"}))

    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(in_a_process, missing.values()))
    return time.monotonic() - started


def _build(kernel: Kernel, folder: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of a pass that fails, Triton prints all it has
    from tunerd.candidates.triton import compile as compiling

    try:
        found = _built(kernel, folder / f"{kernel.key}.cubin")
    except Exception as error:
        found = {"problem": f"{type(error).__name__}: {error}"[:200]}
    shutil.rmtree(compiling.load().knobs.cache.dir, ignore_errors=True)
    place = folder / f"{kernel.key}.json"
    part = place.with_suffix(".part")
    part.write_text(json.dumps(found))
    part.rename(place)


def _built(kernel: Kernel, place: Path) -> dict[str, Any]:
    from tunerd.candidates.triton.compile import build

    started = time.monotonic()
    built = build(
        kernel.text, NAME, kernel.types, arch=ARCH, warps=kernel.warps, stages=kernel.stages
    )
    place.write_bytes(built.asm["cubin"])
    return {
        "secs": time.monotonic() - started,
        "shared_bytes": built.metadata.shared,
        "threads": 32 * built.metadata.num_warps,
        "descriptors": list(built.metadata.tensordesc_meta),
        **seen(built.asm["ptx"], built.asm["ttgir"]),
    }


def seen(ptx: str, ttgir: str) -> dict[str, Any]:
    """Return which instructions of Hopper's a kernel has, and how often they stand there."""
    of = {
        "wgmma": r"wgmma\.mma_async",
        "mma_sync": r"\bmma\.sync",
        "bulk_copies": r"cp\.async\.bulk\.tensor\S*global",
        "copies": r"cp\.async\.c[ga]",
        "setmaxnreg": r"setmaxnreg",
    }
    found: dict[str, Any] = {name: len(re.findall(text, ptx)) for name, text in of.items()}
    return found | {"is_specialised": "ttg.warp_specialize" in ttgir}


def facts(kernels: Sequence[tuple[Variant, Kernel]], folder: Path) -> dict[str, Any]:
    """Return, by kind, how many kernels compiled, what is in them, and why others did not."""
    found: dict[str, Any] = {}
    for variant, kernel in kernels:
        told = json.loads((folder / f"{kernel.key}.json").read_text())
        of = found.setdefault(variant.kind, {"kernels": 0, "problems": {}})
        of["kernels"] += 1
        if problem := told.get("problem"):
            short = problem.split(":")[0]
            of["problems"][short] = of["problems"].get(short, 0) + 1
            continue
        for name in ("wgmma", "mma_sync", "bulk_copies", "copies", "setmaxnreg", "is_specialised"):
            of[name] = of.get(name, 0) + bool(told[name])
    return found
