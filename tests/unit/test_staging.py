"""Pinned memory in which requests wait, with memory of the host in its place."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lib.fake_gpu import HostMemory
from tunerd.artifacts.staging import PinnedArrays, PinnedPool
from tunerd.vocabulary import Arrays, TensorSpec

SPECS = (
    TensorSpec("x", (2, 3), "float16"),
    TensorSpec("none", (0, 4), "float32"),
    TensorSpec("offset", (), "int64"),
)


def inputs(value: int) -> Arrays:
    return {
        "x": np.full((2, 3), value, "float16"),
        "none": np.zeros((0, 4), "float32"),
        "offset": np.array(value, "int64"),
    }


def made(*, is_lent: bool = False) -> PinnedArrays:
    return PinnedArrays(HostMemory(), SPECS, is_lent=is_lent)


def test_arrays_lie_where_their_places_say() -> None:
    held = made()
    held.write(inputs(3))
    assert {name: size for name, (_, size) in held.places.items()} == {"x": 12, "offset": 8}
    assert all(held[name].ctypes.data == at for name, (at, _) in held.places.items())
    assert all(np.array_equal(held[name], array) for name, array in inputs(3).items())
    with pytest.raises(TypeError):
        held.write(inputs(3) | {"x": np.zeros((2, 3), "float32")})


def test_a_pool_copies_a_request_and_leaves_those_for_which_it_has_no_room() -> None:
    pool = PinnedPool(made, request_bytes=(64 << 20) // 2)
    given = [inputs(value) for value in range(3)]
    held = [pool.holding(each) for each in given]
    assert [isinstance(each, PinnedArrays) for each in held] == [True, True, False]
    assert held[2] is given[2]
    given[0]["x"][:] = 9  # the caller's, who may go on with it
    assert np.array_equal(held[0]["x"], inputs(0)["x"])
    for each in held:
        pool.give_back(each)
    again = [pool.holding(inputs(7)) for _ in range(3)]
    assert {id(each) for each in again[:2]} == {id(each) for each in held[:2]}
    assert not isinstance(again[2], PinnedArrays)


def test_what_is_larger_than_the_pool_stays_where_it_is() -> None:
    pool = PinnedPool(made, request_bytes=65 << 20)
    given = inputs(1)
    assert pool.holding(given) is given
    pool.give_back(given)
    assert pool.holding(given) is given


def test_what_was_lent_to_a_caller_is_taken_as_it_is_and_never_given_to_another() -> None:
    pool = PinnedPool(made, request_bytes=32 << 20)
    lent = made(is_lent=True)
    assert pool.holding(lent) is lent
    pool.give_back(lent)
    held = [pool.holding(inputs(1)) for _ in range(3)]
    assert all(each is not lent for each in held)
