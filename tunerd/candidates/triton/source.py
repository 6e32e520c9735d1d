"""Kernels by templates in Triton. A recipe is JSON: the template, and how it is cut.

Templates are written for what a task computes, as its own TIR says (`nest`): the loads, the padding
and the epilogue of the kernel are the task's. Triton is needed where candidates are built, not
where they run: a candidate is a cubin.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from tunerd.candidates.base import (
    CACHED_TASKS,
    CandidateSource,
    DeviceKernel,
    LoweredKernel,
    Search,
    SearchSettings,
)
from tunerd.candidates.host_code import calling, pointer, tensor_map
from tunerd.candidates.nests.nest import Nest, NotANest, nest_of
from tunerd.candidates.template_search import (
    Cuttable,
    TemplateFamily,
    TemplateRecipe,
    TemplateSearch,
)
from tunerd.candidates.triton import bulk, tenants
from tunerd.candidates.triton.attention import Attention, Band
from tunerd.candidates.triton.bulk import BulkProduct
from tunerd.candidates.triton.fold import Fold, Piece
from tunerd.candidates.triton.grouped import Grouped, GroupedTile
from tunerd.candidates.triton.integers import Integers, IntegerTile
from tunerd.candidates.triton.launch import Boxes, Launch, TensorMap
from tunerd.candidates.triton.loops import Block, Loops
from tunerd.candidates.triton.product import MAX_TILES, Product, Tile
from tunerd.candidates.triton.rows import Rows, Strip
from tunerd.candidates.triton.summed import SummedProduct, SummedTile
from tunerd.system.arrays import dtype_of
from tunerd.vocabulary import TRITON, TargetSpec, Task, TensorSpec, architecture, in_lanes

_LEAST_ARCH = 80
_ROWS_OF_TENSOR_CORES = 16  # of their smallest product
_TMA = "tma"
_PRODUCTS = ("integers", "summed", "product", "grouped")


class Template(Cuttable, Protocol):
    """A task as a template that can be cut in several ways, each with `warps` and `stages`."""

    @property
    def nest(self) -> Nest: ...
    @property
    def rows(self) -> int: ...
    def workspace(self, tile: Any) -> int: ...
    def launches(self, tile: Any, name: str) -> tuple[Launch, ...]: ...


class Recipe(TemplateRecipe):
    """A recipe of this source."""

    VERSION = 3
    CUTS = MappingProxyType(
        {
            "attention": Band,
            "integers": IntegerTile,
            "summed": SummedTile,
            "product": Tile,
            _TMA: Tile,
            "grouped": GroupedTile,
            "loops": Block,
            "fold": Piece,
            "rows": Strip,
        }
    )


class TritonSource(CandidateSource):
    """Takes kernels of GPUs with tensor cores that a template fits."""

    name = TRITON

    def __init__(self, *, has_tma: bool = False) -> None:
        """has_tma: whether its search offers products whose operands TMA brings."""
        self._has_tma = has_tma

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        if not target.is_cuda or not is_installed():
            return ()
        return ("triton", "triton.compiler.code_generator", "xgboost")

    def takes(self, task: Task) -> str | None:
        if not task.target.is_cuda:
            return "Triton's templates are for GPUs"
        if capability(task.target) < _LEAST_ARCH:
            arch = architecture(task.target.json)
            return f"Triton's templates are for GPUs of capability 8.0 and more, not {arch}"
        if not is_installed():
            return "Triton is not installed: pip install 'tunerd[triton]'"
        found = templates_of(task)
        return found if isinstance(found, str) else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        parsed = Recipe.parse(recipe)
        templates = templates_of(task, has_tma=parsed.template == _TMA)
        if isinstance(templates, str):
            raise ValueError(templates)
        name = parsed.template
        if name == _TMA and lanes is not None:
            name = "product"  # with the same cut: a tensor map is of one lane's memory
        return lowered(task, templates[name], parsed, lanes=lanes)

    def search(self, settings: SearchSettings) -> Search:
        found = functools.partial(templates_of, has_tma=self._has_tma)
        return TemplateSearch(TemplateFamily(TRITON, Recipe, found), settings)


@functools.cache
def is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def templates_of(task: Task, *, has_tma: bool = False) -> dict[str, Template] | str:
    """Return the templates that fit a task by their names, or why none does.

    has_tma: whether that is among them whose operands TMA brings, where the target has it.
    """
    found = _templates(task.mod_json, task.precision, task.weight_args)
    if not has_tma or isinstance(found, str) or capability(task.target) < bulk.LEAST_ARCH:
        return found
    made = _bulk_product(task.mod_json, task.precision, task.weight_args)
    return found if made is None else {**found, _TMA: made}


def capability(target: TargetSpec) -> int:
    """Return the compute capability of a GPU as a number, 90 for 9.0; 0 where there is none."""
    if not target.is_cuda:
        return 0
    name = architecture(target.json)
    return int(name[3:].rstrip("af")) if name.startswith("sm_") else 0


@functools.lru_cache(CACHED_TASKS)
def _bulk_product(mod_json: str, precision: str, weights: tuple[int, ...]) -> BulkProduct | None:
    found = _templates(mod_json, precision, weights)
    product = None if isinstance(found, str) else found.get("product")
    if not isinstance(product, Product) or product.rows < _ROWS_OF_TENSOR_CORES:
        return None
    try:
        return BulkProduct.of_product(product)
    except NotANest:
        return None


@functools.lru_cache(CACHED_TASKS)
def _templates(
    mod_json: str, precision: str, weights: tuple[int, ...]
) -> dict[str, Template] | str:
    import tvm

    try:
        nest = nest_of(tvm.ir.load_json(mod_json))
    except NotANest as error:
        return f"no template fits: {error}"
    found: dict[str, Template] = {}
    reasons = []
    ways: tuple[tuple[str, Callable[[], Template]], ...] = (
        ("attention", lambda: Attention.of(nest, precision)),
        ("integers", lambda: Integers.of_integers(nest, precision)),
        ("summed", lambda: SummedProduct.of(nest, precision, weights)),
        ("product", lambda: Product.of(nest, precision, weights)),
        ("grouped", lambda: Grouped.of(nest, precision, weights)),
        ("rows", lambda: Rows.of(nest)),
        ("fold", lambda: Fold.of(nest)),
        ("loops", lambda: Loops.of(nest)),
    )
    for name, of in ways:
        try:
            template = of()
        except NotANest as error:
            reasons.append(f"{name}: {error}")
            continue
        found[name] = template
        is_product = name in _PRODUCTS and template.rows >= _ROWS_OF_TENSOR_CORES
        if is_product or name == "attention":
            break  # nothing else comes near
    return found or f"no template fits: {'; '.join(reasons)}"


def lowered(
    task: Task, template: Template, recipe: Recipe, *, lanes: int | None = None
) -> LoweredKernel:
    """Compile a candidate, and return the host code that launches it.

    lanes: of the convention for several tenants; None: that for one model, which has no slots.
    """
    from tunerd.candidates.triton.compile import compile_kernel, load

    identity = f"{task.task_id}\n{recipe.text}"
    if lanes is not None:  # which arguments are weights is in the kernel, too
        identity += f"\n{lanes} {task.weight_args}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    symbol = f"tunerd_{recipe.template}_{digest}"
    values = template.workspace(recipe.cut)
    scratch: tuple[TensorSpec, ...] = ()
    if values:
        scratch = (
            TensorSpec("counters", (MAX_TILES,), "int32"),
            TensorSpec("workspace", (_rounded(values),), "float32"),
        )
    params = (TensorSpec(f"p{i}", t.shape, t.dtype) for i, t in enumerate(template.nest.params))
    specs = (*params, *scratch)
    own_specs = specs
    if lanes is not None:
        specs = in_lanes(specs, task.weight_args, lanes)
        scratch = specs[len(specs) - len(scratch) :]
    kernels: list[DeviceKernel] = []
    calls: list[tuple[str, list[str]]] = []
    before: list[str] = []
    for launch in template.launches(recipe.cut, symbol):
        text, (across, down, deep) = launch.text, launch.grid
        if lanes is not None:
            text = tenants.text_for(text, own_specs, task.weight_args, deep)
            deep *= lanes
            if deep > tenants.MOST_BLOCKS:
                raise ValueError(f"{lanes} lanes of it are more blocks than a grid has on an axis")
        compiled = compile_kernel(
            text,
            launch.name,
            [s.dtype for s in specs],
            arch=architecture(task.target.json),
            warps=launch.warps,
            stages=launch.stages,
            maps=launch.maps,
        )
        made, passed = _with_maps(launch.maps, compiled.maps, len(specs))
        before += made
        types = types_of(len(specs), len(launch.maps))
        compiler = f"triton-{load().__version__}"
        kernels.append(DeviceKernel(launch.name, compiled.cubin, types, compiler))
        started = (0, 0, across, down, deep, compiled.threads, compiled.shared_bytes)
        calls.append((launch.name, [*passed, *(f"T.int64({value})" for value in started)]))
    return LoweredKernel(
        calling(specs, *calls, before=before), tuple(kernels), scratch, lanes=lanes
    )


def types_of(tensors: int, maps: int) -> tuple[str, ...]:
    """Return the types of a kernel's parameters, of which the first are so many tensors.

    Triton passes a tensor map by value, and its extents and strides after it. It adds two pointers
    to each kernel's parameters, to scratch memory that none uses.
    """
    described = ("tensormap", "int32", "int32", "int64", "int64") * maps
    return ("handle",) * tensors + described + ("int64",) * 2


def _with_maps(
    maps: Sequence[TensorMap], told: Sequence[Boxes], tensors: int
) -> tuple[list[str], list[str]]:
    """Return host code that makes tensor maps, and what a kernel is passed before the grid.

    told: what Triton says of each map.
    """
    lines: list[str] = []
    passed = [pointer(i) for i in range(tensors)]
    for number, (each, own) in enumerate(zip(maps, told, strict=True)):
        lines += tensor_map(
            name := f"map{number}",
            pointer(each.param),
            dtype=each.dtype,
            shape=each.shape,
            stride_bytes=each.stride * dtype_of(each.dtype).itemsize,
            box=own.block,
            swizzle=own.swizzle,
        )
        extents = (f"T.int32({extent})" for extent in each.shape)
        passed += [name, *extents, f"T.int64({each.stride})", "T.int64(1)"]
    return lines, passed


def _rounded(values: int) -> int:
    """Round up, so that the workspaces of many candidates are of few sizes."""
    return 1 << max(14, (values - 1).bit_length())
