"""Sums of products in a CPU's vector registers, cut by a template. A recipe is JSON: how it is cut.

Two sources: `vnni` for products of 8 bits, on CPUs with AMX by that, too; `fma` for those of fp32.
"""

from __future__ import annotations

import contextlib
import functools
import json
from types import MappingProxyType

from tunerd.candidates.base import (
    CACHED_TASKS,
    CandidateSource,
    LoweredKernel,
    Search,
    SearchSettings,
    module_of,
)
from tunerd.candidates.registers import units
from tunerd.candidates.registers.amx import Amx, AmxCut
from tunerd.candidates.registers.sums import Cut, Sums
from tunerd.candidates.registers.winograd import Winograd, WinogradCut
from tunerd.candidates.template_search import TemplateFamily, TemplateRecipe, TemplateSearch
from tunerd.vocabulary import FMA, VNNI, TargetSpec, Task
from tunerd.vocabulary.model import INTEGER_PRODUCTS

TEMPLATE, PACKED, OVERLAPPING = "dots", "packed", "overlapping"
WINOGRAD, AMX = "winograd", "amx"

Template = Sums | Winograd | Amx


class Recipe(TemplateRecipe):
    """A recipe of these sources."""

    VERSION = 3
    CUTS = MappingProxyType({
        TEMPLATE: Cut, PACKED: Cut, OVERLAPPING: Cut, WINOGRAD: WinogradCut, AMX: AmxCut,
    })  # fmt: skip


class RegistersSource(CandidateSource):
    """Takes a CPU's kernels that have one block of sums of products."""

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        return () if target.is_cuda else ("tvm.s_tir", "xgboost")

    def takes(self, task: Task) -> str | None:
        found = self.templates_of(task)
        return found if isinstance(found, str) else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        parsed = Recipe.parse(recipe)
        templates = self.templates_of(task)
        if isinstance(templates, str):
            raise ValueError(templates)
        template, cut = templates[parsed.template], parsed.cut
        if lanes is not None and template.layouts(cut):
            # The weights of several models lie as each has them, for all numbers of lanes alike.
            template = templates[TEMPLATE]
            if parsed.template == WINOGRAD:
                cut = min(template.tiles(), key=lambda c: template.estimated_secs(c, 0.0))
        made = template.scheduled(module_of(task), cut)
        return LoweredKernel(made, layouts=template.layouts(cut))

    def search(self, settings: SearchSettings) -> Search:
        return TemplateSearch(TemplateFamily(self.name, Recipe, self.templates_of), settings)

    def templates_of(self, task: Task) -> dict[str, Template] | str:
        """Return the template of a task by its name, or why it has none."""
        if task.target.is_cuda:
            return f"{self.name.upper()} is a CPU's"
        if self.name == VNNI and INTEGER_PRODUCTS not in task.mod_json:
            return "it has no products of 8 bits"
        found = _templates(self.name, task.mod_json, task.target.json)
        if isinstance(found, str):
            return found
        sums, packed = found.get(TEMPLATE), None
        if isinstance(sums, Sums) and task.tenants == 1:
            packed = sums.packed(task.weight_args)
        if packed is None:  # the weights are to be taken as they are
            return {name: of for name, of in found.items() if name != WINOGRAD}
        return found | {PACKED: packed}


class VnniSource(RegistersSource):
    """Takes kernels that the graph's pass made of quantized products."""

    name = VNNI


class FmaSource(RegistersSource):
    """Takes convolutions with channels last and products with a matrix, in fp32."""

    name = FMA


@functools.lru_cache(CACHED_TASKS)
def _templates(name: str, mod_json: str, target_json: str) -> dict[str, Template] | str:
    import tvm

    target = tvm.target.Target(json.loads(target_json))
    cores = int(target.attrs.get("num-cores", 1))
    try:
        unit = units.vnni(target) if name == VNNI else units.fma(target)
    except ValueError as error:
        return str(error)
    mod, why = tvm.ir.load_json(mod_json), ""
    found: dict[str, Template] = {}
    for template in (TEMPLATE, OVERLAPPING):
        try:
            found[template] = Sums.of(mod, unit, cores, is_overlapping=template == OVERLAPPING)
        except ValueError as error:
            why = why or str(error)
    if isinstance(sums := found.get(TEMPLATE), Sums):
        with contextlib.suppress(ValueError):
            found[WINOGRAD] = Winograd.of(mod, sums)
        if name == VNNI and units.has_tiles(target):
            with contextlib.suppress(ValueError):
                found[AMX] = Amx.of(mod, sums)
    return found or why
