"""Products of 8 bits by AVX-512 VNNI, cut by a template. A recipe is JSON: how it is cut."""

from __future__ import annotations

import functools
import json
from types import MappingProxyType

from tunerd.candidates.base import (
    CandidateSource,
    LoweredKernel,
    Search,
    SearchSettings,
    module_of,
)
from tunerd.candidates.template_search import TemplateFamily, TemplateRecipe, TemplateSearch
from tunerd.candidates.vnni.dots import Cut, Dots
from tunerd.vocabulary import VNNI, TargetSpec, Task
from tunerd.vocabulary.model import INTEGER_PRODUCTS

_CACHED_TASKS = 512


class Recipe(TemplateRecipe):
    """A recipe of this source."""

    VERSION = 1
    CUTS = MappingProxyType({"dots": Cut})


class VnniSource(CandidateSource):
    """Takes kernels that the graph's pass made of quantized products."""

    name = VNNI

    def imports(self, target: TargetSpec) -> tuple[str, ...]:
        return () if target.is_cuda else ("tvm.s_tir", "xgboost")

    def takes(self, task: Task) -> str | None:
        found = templates_of(task)
        return found if isinstance(found, str) else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        parsed = Recipe.parse(recipe)
        templates = templates_of(task)
        if isinstance(templates, str):
            raise ValueError(templates)
        return LoweredKernel(templates[parsed.template].scheduled(module_of(task), parsed.cut))

    def search(self, settings: SearchSettings) -> Search:
        return TemplateSearch(TemplateFamily(VNNI, Recipe, templates_of), settings)


def templates_of(task: Task) -> dict[str, Dots] | str:
    """Return the template of a task by its name, or why it has none."""
    if task.target.is_cuda:
        return "VNNI is a CPU's"
    if INTEGER_PRODUCTS not in task.mod_json:
        return "it has no products of 8 bits"
    return _templates(task.mod_json, task.target.json)


@functools.lru_cache(_CACHED_TASKS)
def _templates(mod_json: str, target_json: str) -> dict[str, Dots] | str:
    import tvm

    cores = int(json.loads(target_json).get("num-cores", 1))
    try:
        return {"dots": Dots.of(tvm.ir.load_json(mod_json), cores)}
    except ValueError as error:
        return str(error)
