"""Products by cuBLASLt: each algorithm that its heuristic names is a candidate.

A task is taken where all of it is one call: what the library's epilogue does not do, as the GELU of
most exported models, leaves a task to other sources.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace

from tunerd.candidates.base import CandidateSource, LoweredKernel, Search, SearchSettings
from tunerd.candidates.host_code import calling, pointer
from tunerd.candidates.libraries.matmul import Matched, matmul_of
from tunerd.candidates.libraries.recipe import Recipe
from tunerd.candidates.libraries.search import RankSearch
from tunerd.candidates.nests.nest import NotANest, nest_of
from tunerd.libraries import cublaslt, packages
from tunerd.libraries.calls import function_name
from tunerd.vocabulary import CUBLASLT, LibraryCall, Task, TensorSpec

_CACHED_TASKS = 512


class CublasLtSource(CandidateSource):
    """Takes kernels of GPUs that are one product with what cuBLASLt does after it."""

    name = CUBLASLT

    def takes(self, task: Task) -> str | None:
        if not task.target.is_cuda:
            return "cuBLASLt is for GPUs"
        if task.tenants > 1:
            return "cuBLASLt takes the weights of one model"
        if lacking := packages.missing(CUBLASLT):
            return lacking
        found = _matched(task)
        return found if isinstance(found, str) else None

    def lower(self, task: Task, recipe: str, lanes: int | None = None) -> LoweredKernel:
        if lanes is not None:
            raise ValueError("cuBLASLt takes the weights of one model")
        parsed = Recipe.parse(recipe)
        found = _matched(task)
        if isinstance(found, str):
            raise ValueError(found)
        call = replace(found.call, sms=parsed.sms, rank=parsed.rank)
        values = cublaslt.WORKSPACE_BYTES // 4
        scratch = (TensorSpec("workspace", (values,), "float32"),)
        types = dict(found.casts)
        args = [replace(s, dtype=types.get(i, s.dtype)) for i, s in enumerate(task.args)]
        specs = (*args, *scratch)
        passed = [json.dumps(call.text), *map(pointer, (*found.params, len(task.args)))]
        mod = calling(function_name(CUBLASLT), specs, passed)
        made = LibraryCall(CUBLASLT, call.text)
        return LoweredKernel(mod, scratch=scratch, calls=(made,), casts=found.casts)

    def search(self, settings: SearchSettings) -> Search:
        return RankSearch(
            CUBLASLT,
            cublaslt.RANKS,
            sms=settings.sms or 0,
            version=packages.wheel_version(CUBLASLT),
        )


def _matched(task: Task) -> Matched | str:
    """Return a task as a call, or why it is none."""
    return _matched_mod(task.mod_json, task.precision, task.weight_args)


@functools.lru_cache(_CACHED_TASKS)
def _matched_mod(mod_json: str, precision: str, weights: tuple[int, ...]) -> Matched | str:
    import tvm

    try:
        return matmul_of(nest_of(tvm.ir.load_json(mod_json)), precision, weights)
    except NotANest as error:
        return f"it is no product of cuBLASLt's: {error}"
