"""How a function is cut first: as the estimates say."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunerd.candidates.registers import units
from tunerd.candidates.registers.amx import Amx
from tunerd.candidates.registers.sums import Sums
from tunerd.vocabulary import Layout

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.target import Target


@dataclass(frozen=True)
class FirstCut:
    """A function as it is cut first. layouts: as `LoweredKernel.layouts`."""

    mod: IRModule
    layouts: tuple[tuple[int, Layout], ...]


def first_cut(mod: IRModule, target: Target, weight_args: Collection[int] = ()) -> FirstCut | None:
    """Return how the estimate would cut a function; None where it has no sums.

    weight_args: the parameters that are the model's weights, which may be packed.
    """
    cores = int(target.attrs.get("num-cores", 1))
    found: list[tuple[float, bool, Any, Any]] = []
    for make, is_overlapping in ((units.fma, False), (units.fma, True), (units.vnni, False)):
        with contextlib.suppress(ValueError):
            sums = Sums.of(mod, make(target), cores, is_overlapping=is_overlapping)
            for each in filter(None, (sums, sums.packed(weight_args))):
                cuts = each.tiles()
                found += ((each.estimated_secs(c, 0.0), not each.is_packed, each, c) for c in cuts)
            if make is units.vnni and units.has_tiles(target):
                amx = Amx.of(mod, sums)
                found += ((amx.estimated_secs(c, 0.0), True, amx, c) for c in amx.tiles())
    if not found:
        return None
    _, _, template, best = min(found, key=operator.itemgetter(0, 1))
    return FirstCut(template.scheduled(mod, best), template.layouts(best))
