"""Kernels of libraries: whatever their heuristics name for a task is a candidate.

A task is taken where all of it is one call: what the library does not do after its sum, as the GELU
of most exported models in cuBLASLt, leaves a task to other sources.
"""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tunerd.candidates.base import (
    CACHED_TASKS,
    CandidateSource,
    LoweredKernel,
    Search,
    SearchSettings,
    taken,
)
from tunerd.candidates.host_code import calling, pointer
from tunerd.candidates.libraries.convolution import convolution_of
from tunerd.candidates.libraries.matched import Matched
from tunerd.candidates.libraries.matmul import matmul_of
from tunerd.candidates.libraries.recipe import PlanRecipe, Recipe
from tunerd.candidates.libraries.search import ListSearch
from tunerd.candidates.nests.nest import NotANest, nest_of
from tunerd.libraries import cublaslt, naming, packages
from tunerd.libraries.calls import function_name
from tunerd.libraries.cudnn_graphs import device_text
from tunerd.libraries.packages import PACKAGES, LibraryCallError
from tunerd.vocabulary import CUBLASLT, CUDNN, LibraryCall, Task, TensorSpec, architecture

_USUAL_SMS, _USUAL_L2_BYTES = 132, 50 << 20  # of an H100


class LibrarySource(CandidateSource):
    """Takes kernels of GPUs that are one call of a library."""

    computes: str  # what the library has, as "product"
    match: Callable[..., Matched[Any]]

    def takes(self, task: Task) -> str | None:
        title = PACKAGES[self.name].title
        if not task.target.is_cuda:
            return f"{title} is for GPUs"
        if task.tenants > 1:
            return f"{title} takes the weights of one model"
        if lacking := packages.missing(self.name):
            return lacking
        found = self.matched(task)
        return found if isinstance(found, str) else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        if lanes is not None:
            raise ValueError(f"{PACKAGES[self.name].title} takes the weights of one model")
        found = self.matched(task)
        if isinstance(found, str):
            raise ValueError(found)
        text, workspace_bytes = self.chosen(found.call, recipe)
        scratch = (TensorSpec("workspace", (max(1, -(-workspace_bytes // 4)),), "float32"),)
        specs = (*taken(task.args, found.casts, found.layouts), *scratch)
        passed = [json.dumps(text), *map(pointer, (*found.params, len(task.args)))]
        return LoweredKernel(
            calling(specs, (function_name(self.name), passed)),
            scratch=scratch,
            calls=(LibraryCall(self.name, text),),
            casts=found.casts,
            layouts=found.layouts,
        )

    @abstractmethod
    def chosen(self, call: Any, recipe: str) -> tuple[str, int]:
        """Return the text of a call by a recipe's kernels, and the bytes of its workspace."""

    def matched(self, task: Task) -> Matched[Any] | str:
        """Return a task as a call, or why it is none."""
        weights = tuple(task.weight_args)
        return _matched(type(self), task.mod_json, task.precision, weights)


class CublasLtSource(LibrarySource):
    """Products by cuBLASLt."""

    name = CUBLASLT
    computes = "product"
    match = staticmethod(matmul_of)

    def chosen(self, call: Any, recipe: str) -> tuple[str, int]:
        parsed = Recipe.parse(recipe)
        return replace(call, sms=parsed.sms, rank=parsed.rank).text, cublaslt.WORKSPACE_BYTES

    def search(self, settings: SearchSettings) -> Search:
        version = packages.wheel_version(CUBLASLT)
        ranks = range(cublaslt.RANKS)
        recipes = [Recipe(rank, settings.sms or 0, version).text for rank in ranks]
        # Behind the last that the heuristic names, all others fail.
        return ListSearch(CUBLASLT, lambda task: recipes, most_failed=4)


class CudnnSource(LibrarySource):
    """Convolutions by cuDNN, whose heuristics are asked where candidates are proposed."""

    name = CUDNN
    computes = "convolution"
    match = staticmethod(convolution_of)

    def chosen(self, call: Any, recipe: str) -> tuple[str, int]:
        configuration = PlanRecipe.parse(recipe).configuration
        return replace(call, configuration=configuration).text, configuration.workspace_bytes

    def search(self, settings: SearchSettings) -> Search:
        version = packages.wheel_version(CUDNN)

        def recipes(task: Task) -> list[str]:
            found = self.matched(task)
            if isinstance(found, str):
                raise LibraryCallError(found)
            target = json.loads(task.target.json)
            l2_bytes = int(target.get("l2_cache_size_bytes", _USUAL_L2_BYTES))
            device = device_text(
                architecture(task.target.json), settings.sms or _USUAL_SMS, l2_bytes
            )
            named = naming.named(found.call, device)
            return [PlanRecipe(each, version).text for each in named]

        return ListSearch(CUDNN, recipes, most_failed=8)


@functools.lru_cache(CACHED_TASKS)
def _matched(
    source: type[LibrarySource], mod_json: str, precision: str, weights: tuple[int, ...]
) -> Matched[Any] | str:
    import tvm

    try:
        return source.match(nest_of(tvm.ir.load_json(mod_json)), precision, weights)
    except NotANest as error:
        return f"it is no {source.computes} of {PACKAGES[source.name].title}'s: {error}"
