#!/usr/bin/env python3
"""Have hundreds of models of one architecture ready on one device, and ask any of them.

    PYTHONPATH=.:scripts python3 -m lab.colocation.resident ARTIFACT --tenants 500 --out FOLDER

ARTIFACT serves several tenants (`tunerd tune --tenants`). Each tenant gets weights of its own, the
artifact's with every tensor scaled by a little. Requests come from one thread, as many in a launch
as the artifact takes, each for a tenant at random:

- few: of as many tenants as a launch takes, all on the device
- all: of all tenants, all on the device, each as often as any other
- cold: with room for --resident of them, each as often as any other
- skewed: with the same room, the n-th tenant 1/n times as often as the first

Of each the requests a second, the part of them that found their weights on the device, and what one
more tenant and one cold request take. Before and after, some tenants are asked the same again, and
their answers must be the same and differ from each other's. Writes resident.json and resident.txt.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lab.colocation.steps import say
from lab.lab import made_by, table, write
from tunerd.artifacts.loading import load
from tunerd.artifacts.super_model import SuperModel
from tunerd.colocation import artifacts
from tunerd.vocabulary import Arrays

_SCALED = 0.02  # at most, of a tenant's tensor
_CHECKED = 8  # tenants
_LAUNCHES = 64  # between two looks at the clock


def weights_of(own: Mapping[str, Any], casts: Mapping[str, Any], seed: int) -> Arrays:
    """Return weights of one more tenant, without those that are others in another type."""
    random = np.random.default_rng(seed)
    made: Arrays = {}
    for name, array in own.items():
        factor = 1 + random.uniform(-_SCALED, _SCALED)
        is_scaled = array.dtype.kind == "f"
        if name not in casts:
            made[name] = (array * array.dtype.type(factor)) if is_scaled else array
    return made


def loaded(artifact: Path, names: Sequence[str], tenant_bytes: int | None) -> SuperModel:
    """Return the model with tenants of these names besides its own."""
    model = load(artifact, tenant_bytes=tenant_bytes)
    if not isinstance(model, SuperModel):
        raise SystemExit(f"{artifact} serves one tenant; tune with --tenants 1,8")
    own = {name: tensor.numpy() for name, tensor in model.weights.items()}
    casts: Mapping[str, Any] = model.manifest["casts"]
    with ThreadPoolExecutor(8) as executor:
        made = executor.map(lambda n: weights_of(own, casts, n), range(len(names)))
        for name, weights in zip(names, made, strict=True):
            model.add(name, weights)
    return model


def chosen(names: Sequence[str], is_skewed: bool, seed: int) -> Iterator[str]:
    """Yield tenants at random."""
    random = np.random.default_rng(seed)
    parts = 1 / np.arange(1, len(names) + 1) if is_skewed else np.ones(len(names))
    while True:
        for number in random.choice(len(names), 4096, p=parts / parts.sum()):
            yield names[number]


def asked(model: SuperModel, which: Iterator[str], inputs: Arrays, secs: float) -> dict[str, Any]:
    """Ask tenants for so long; return the rate, and which part found its weights there."""
    count, found, done = model.counts[-1], 0, 0
    began = time.monotonic()
    while (took := time.monotonic() - began) < secs or not done:
        for _ in range(_LAUNCHES):
            some = [*itertools.islice(which, count)]
            found += sum(map(model.is_resident, some))
            model.run([(name, inputs) for name in some])
            done += count
    return {"per_sec": done / took, "found": found / done, "requests": done, "secs": took}


def cold_secs(model: SuperModel, names: Sequence[str]) -> list[float]:
    """Return what it takes to bring each of some tenants that are not on the device."""
    secs = []
    for name in names:
        if not model.is_resident(name):
            began = time.monotonic()
            model.bring([name])
            secs.append(time.monotonic() - began)
    return secs


def answers(model: SuperModel, names: Sequence[str], inputs: Arrays) -> list[np.ndarray[Any, Any]]:
    """Return the first output of each tenant, alone in its launch."""
    return [next(iter(model.run([(name, inputs)])[0].values())) for name in names]


def agree(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Say whether tenants answer as before, each in its own way."""
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
    return same and not any(
        np.array_equal(a, b, equal_nan=True) for a, b in itertools.combinations(before, 2)
    )


def measured(options: argparse.Namespace) -> dict[str, Any]:
    names = [f"tenant-{n}" for n in range(options.tenants)]
    inputs = artifacts.sample_inputs(options.artifact)
    checked = names[:: max(1, len(names) // _CHECKED)][:_CHECKED]
    say(f"loading {len(names)} tenants")
    model = loaded(options.artifact, names, None)
    began = time.monotonic()
    model.bring(names)
    document: dict[str, Any] = {
        **made_by(),
        "tenants": len(names),
        "resident": options.resident,
        "together": model.counts[-1],
        "tenant_bytes": model.piece_bytes,
        "bring_all_secs": time.monotonic() - began,
        "ways": {},
    }
    first = answers(model, checked, inputs)
    ways = document["ways"]
    say("few, all")
    few = names[: model.counts[-1]]
    ways["few"] = asked(model, chosen(few, False, 0), inputs, options.secs)
    ways["all"] = asked(model, chosen(names, False, 1), inputs, options.secs)
    is_right = agree(first, answers(model, checked, inputs))
    del model
    say(f"loading them with room for {options.resident}")
    size = document["tenant_bytes"]
    model = loaded(options.artifact, names, options.resident * size)
    ways["cold"] = asked(model, chosen(names, False, 2), inputs, options.secs)
    ways["skewed"] = asked(model, chosen(names, True, 3), inputs, options.secs)
    document["cold_secs"] = cold_secs(model, names)
    document["is_right"] = is_right and agree(first, answers(model, checked, inputs))
    return document


def shown(document: Mapping[str, Any]) -> str:
    rows = [
        [way, f"{found['per_sec']:,.0f}", f"{100 * found['found']:.1f}%"]
        for way, found in document["ways"].items()
    ]
    cold_ms = 1e3 * statistics.median(document["cold_secs"] or [0.0])
    said = [
        f"{document['tenants']} tenants of {document['tenant_bytes'] / 1e6:.1f} MB each, "
        f"{document['together']} requests in a launch, room for {document['resident']} in cold "
        "and skewed",
        "",
        table(("requests", "a second", "weights were there"), rows, numbers=range(1, 3)),
        f"- a tenant that is not there costs {cold_ms:.3g} ms, the median",
        f"- each answers as before, and as no other: {'yes' if document['is_right'] else 'NO'}",
    ]
    return "\n".join(said) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--tenants", type=int, default=500)
    parser.add_argument("--resident", type=int, default=100, help="for whom there is room")
    parser.add_argument("--secs", type=float, default=5.0, help="of each way")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = measured(options)
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "resident.json", document)
    (options.out / "resident.txt").write_text(shown(document))
    print(shown(document), end="")


if __name__ == "__main__":
    main()
