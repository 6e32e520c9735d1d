"""Run an artifact for CUDA in ways that servers do, and compare: the argument is its folder."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from cuda.bindings import driver

import tunerd


def main() -> None:
    model = tunerd.load(sys.argv[1])
    random = np.random.default_rng(0)
    batches = [
        {s.name: random.standard_normal(s.shape).astype(s.dtype) for s in model.inputs}
        for _ in range(6)
    ]
    usual = [model(batch) for batch in batches]

    _, stream = driver.cuStreamCreate(1)
    for batch, expected in zip(batches, usual, strict=True):
        made = model.run_dlpack(batch, stream=int(stream))
        driver.cuStreamSynchronize(stream)
        same({name: tensor.numpy() for name, tensor in made.items()}, expected)
    same(model(batches[0]), usual[0])  # on the default stream again

    captures = [model.captured() for _ in range(3)] + [model.captured(int(stream))]
    assert len({each.stream for each in captures}) == len(captures)
    for first in range(3):  # each of them has other inputs, and all run at once
        mine = [batches[(first + i) % len(batches)] for i in range(len(captures))]
        for each, batch in zip(captures, mine, strict=True):
            each.write(batch)
        for _ in range(50):
            for each in captures:
                each.launch()
        for i, each in enumerate(captures):
            same(each.read(), usual[(first + i) % len(batches)])
    same(model(batches[1]), usual[1])  # beside its captures
    staged(model, batches, usual)
    in_segments(model, batches, usual)
    print("all the same")


def staged(model: Any, batches: list[dict[str, Any]], usual: list[dict[str, Any]]) -> None:
    """Two at a time on each of two streams, each with other inputs than the one before."""
    streams = [int(driver.cuStreamCreate(1)[1]) for _ in range(2)]
    pairs = [model.staged(stream, 2) for stream in streams]
    for turn in range(50):
        numbers = [(turn + i) % len(batches) for i in range(4)]
        under_way = [
            (pairs[i % 2][i // 2], streams[i % 2], number) for i, number in enumerate(numbers)
        ]
        for each, stream, number in under_way:
            each.launch(batches[number], stream)
        for each, _, number in under_way:
            while not each.is_done():
                pass
            assert 0 < each.secs() < 1
            same(each.read(), usual[number])


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def in_segments(model: Any, batches: list[dict[str, Any]], usual: list[dict[str, Any]]) -> None:
    """Two models in turns on one stream, a piece of each, as an engine's lane has them."""
    made_on, run_on = (int(driver.cuStreamCreate(1)[1]) for _ in range(2))
    pair = [model.staged_segments(made_on, 1e-6) for _ in range(2)]
    assert len(pair[0].pieces) == len(pair[0].segment_secs) == len(pair[0].ends) > 1
    assert all(secs > 0 for secs in pair[0].segment_secs)
    for turn in range(20):
        numbers = [(turn + i) % len(batches) for i in range(2)]
        for each, number in zip(pair, numbers, strict=True):
            each.launch(batches[number], run_on)
        for one, other in zip(*(each.pieces[1:] for each in pair), strict=True):
            one.launch(run_on)
            other.launch(run_on)
        for each, number in zip(pair, numbers, strict=True):
            while not all(piece.is_done() for piece in each.pieces):
                pass
            assert all(0 < piece.secs() < 1 for piece in each.pieces)
            same(each.read(), usual[number])


if __name__ == "__main__":
    main()
