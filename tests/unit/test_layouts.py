"""Layouts of weights: where a kernel finds an element is where it was put."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunerd.vocabulary import Layout
from tunerd.vocabulary.winograd import TRANSFORMS

splits = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)


@given(splits.flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(sum(map(len, s)))))))
def test_an_element_is_where_its_layout_says(drawn: tuple[list[list[int]], list[int]]) -> None:
    parts, axes = drawn
    weight = np.arange(math.prod(map(math.prod, parts))).reshape([math.prod(p) for p in parts])
    layout = Layout(tuple(size for each in parts for size in each), tuple(axes))
    laid_out = layout.of(weight)
    assert laid_out.shape == layout.shape
    for index, value in np.ndenumerate(weight):
        assert laid_out[tuple(layout.place(index, weight.shape))] == value
    assert (layout.back(laid_out, weight.shape) == weight).all()


@pytest.mark.parametrize("outputs", TRANSFORMS)
def test_transformed_filters_give_the_outputs_of_a_tile(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    filters = rng.standard_normal((3, 3, 1, 2))
    size = outputs + 2
    tile = rng.standard_normal((size, size))
    layout = Layout((size, size, 1, 2), (3, 0, 1, 2), winograd=outputs)
    laid_out = layout.of(filters)
    assert laid_out.shape == layout.shape
    of = TRANSFORMS[outputs]
    inputs, after = np.array(of.inputs), np.array(of.outputs)
    for column in range(2):
        products = laid_out[column, :, :, 0] * (inputs @ tile @ inputs.T)
        expected = [
            [(filters[:, :, 0, column] * tile[i : i + 3, j : j + 3]).sum() for j in range(outputs)]
            for i in range(outputs)
        ]
        np.testing.assert_allclose(after @ products @ after.T, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(layout.back(laid_out, filters.shape), filters, rtol=1e-12)


@pytest.mark.parametrize("outputs", TRANSFORMS)
def test_filters_keep_their_type(outputs: int) -> None:
    filters = np.random.default_rng(0).standard_normal((3, 3, 4, 8)).astype(np.float32)
    layout = Layout(((outputs + 2) ** 2, 4, 8), (0, 1, 2), winograd=outputs)
    assert layout.of(filters).dtype == filters.dtype
    restored = layout.back(layout.of(filters), filters.shape)
    assert restored.dtype == filters.dtype
    np.testing.assert_allclose(restored, filters, rtol=1e-5, atol=1e-6)
