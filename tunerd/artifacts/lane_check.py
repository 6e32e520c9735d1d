"""What each lane computes, and what a model of its tenant's weights alone computes of the same.

The tenants are made up: the artifact's own weights, and seeded variations of them. Of R lanes R + 1
tenants are tried, out of order, and one of them twice in a launch: a lane that took another's
weights or rows, or its neighbour's, would not agree with its tenant alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunerd.artifacts.loading import LoadedModel
from tunerd.artifacts.manifest import is_counter
from tunerd.artifacts.super_model import SuperModel
from tunerd.artifacts.weights import kernel_layouts, unpacked
from tunerd.system.arrays import is_floating
from tunerd.vocabulary import Arrays

_SPREAD = 0.5  # by which share of itself a weight is moved at most; its sign stays


_IN_LANE, _ALONE = "in a lane", "alone"  # of the names of outputs


def outputs_of(model: LoadedModel, alone: LoadedModel, inputs: Arrays) -> Arrays:
    """Return the outputs of requests in lanes and alone, all by names that `pairs_of` reads.

    inputs: of a request by "number name", from 0 on; requests take them in turn.
    """
    if not isinstance(model, SuperModel):
        raise ValueError("the artifact serves one model")
    given: dict[str, Arrays] = {}
    for key, array in inputs.items():
        number, _, name = key.partition(" ")
        given.setdefault(number, {})[name] = array
    made: Arrays = {}
    for place, pair in enumerate(lanes_and_alone(model, alone, list(given.values()))):
        for where, outputs in zip((_IN_LANE, _ALONE), pair, strict=True):
            made |= {f"{place} {where} {name}": array for name, array in outputs.items()}
    return made


def inputs_for(inputs: Sequence[Arrays]) -> Arrays:
    """Return sets of inputs by name as one, by the names that `outputs_of` reads."""
    return {f"{i} {name}": array for i, given in enumerate(inputs) for name, array in given.items()}


def pairs_of(outputs: Arrays) -> list[tuple[Arrays, Arrays]]:
    """Return what `outputs_of` returned: for each request its outputs in a lane and those alone."""
    pairs: dict[str, tuple[Arrays, Arrays]] = {}
    for key, array in outputs.items():
        number, _, rest = key.partition(" ")
        found = pairs.setdefault(number, ({}, {}))
        for where, of in zip((_IN_LANE, _ALONE), found, strict=True):
            if rest.startswith(f"{where} "):
                of[rest.removeprefix(f"{where} ")] = array
    return list(pairs.values())


def lanes_and_alone(
    model: SuperModel, alone: LoadedModel, inputs: Sequence[Arrays]
) -> list[tuple[Arrays, Arrays]]:
    """Return for each request that was tried its outputs in a lane, and those of its tenant alone.

    Args:
        alone: the model of one tenant, of the same architecture, whose weights are changed.
        inputs: by name; requests take them in turn.
    """
    names: list[str] = []
    there = {n: w for n, w in alone.weights.items() if not is_counter(n)}
    layouts = kernel_layouts(alone.manifest)
    own = unpacked({n: w.numpy() for n, w in there.items()}, alone.manifest)
    own = {name: weight for name, weight in own.items() if name not in layouts}
    for number in range(max(model.counts) + 1):
        names.append(model.own if number == 0 else f"{model.own} varied {number}")
        if number:
            model.add(names[-1], varied(own, number, _casts(alone)))
    requests: list[tuple[int, Mapping[str, Any]]] = []
    found: list[Arrays] = []
    for count in model.counts:
        for launch in launches(count):
            given = [inputs[(len(requests) + lane) % len(inputs)] for lane in range(count)]
            requests += zip(launch, given, strict=True)
            found += model.run(list(zip((names[tenant] for tenant in launch), given, strict=True)))
    expected: dict[int, Arrays] = {}
    for number, name in enumerate(names):
        weights = varied(own, number, _casts(alone)) if number else own
        for key, weight in there.items():
            of, layout, _ = layouts.get(key, (key, None, ()))
            weight.copyfrom(weights[of] if layout is None else layout.of(weights[of]))
        for place, (tenant, asked) in enumerate(requests):
            if tenant == number:
                expected[place] = alone(asked)
        if number:
            model.remove(name)
    return [(outputs, expected[place]) for place, outputs in enumerate(found)]


def launches(count: int) -> Iterator[tuple[int, ...]]:
    """Yield which tenants the lanes of some launches take: `count` + 1 of them in all.

    >>> list(launches(4))
    [(3, 2, 1, 0), (4, 4, 1, 2)]
    """
    yield tuple(reversed(range(count)))
    yield (count, count, *range(1, count))[:count]


def varied(
    weights: Mapping[str, Any],
    seed: int,
    casts: Mapping[str, tuple[str, str]],
) -> Arrays:
    """Return weights by name with each float moved by a share of itself, seeded; others stay.

    casts: which of them are others in another type, by name.
    """
    made: Arrays = {}
    for name, weight in weights.items():
        made[name] = weight
        if is_floating(weight.dtype) and name not in casts:
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            factors = rng.uniform(1.0 - _SPREAD, 1.0 + _SPREAD, weight.shape)
            made[name] = (weight.astype(np.float32) * factors).astype(weight.dtype)
    return made | {n: made[origin].astype(weights[n].dtype) for n, (origin, _) in casts.items()}


def _casts(model: LoadedModel) -> Mapping[str, tuple[str, str]]:
    return {n: (o, t) for n, (o, t) in model.manifest.get("casts", {}).items()}
