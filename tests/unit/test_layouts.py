"""Layouts of weights: where a kernel finds an element is where it was put."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tunerd.vocabulary import Layout

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
