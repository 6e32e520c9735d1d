"""Memory for callers' inputs that processes map as well."""

from __future__ import annotations

import os

import pytest

from tunerd.colocation.places import lent as lent_module
from tunerd.colocation.places.lent import Lender, Lent
from tunerd.vocabulary import TensorSpec

SPECS = (TensorSpec("x", (2, 3), "float32"), TensorSpec("a", (), "int64"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_lent_is_there_until_nobody_holds_an_array_of_it() -> None:
    lender, before = Lender(), descriptors()
    lent = lender.lent(SPECS)
    assert isinstance(lent, Lent)
    assert list(lent) == ["x", "a"]
    assert not lent["x"].any()
    number, row = lent.number, lent["x"][0]
    del lent
    assert not lender.gone
    row[...] = 1.0
    del row
    assert list(lender.gone) == [number]
    assert descriptors() == before


def test_so_much_is_lent_at_a_time_and_the_rest_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_module, "_MOST", 2)
    lender = Lender()
    held = [lender.lent(SPECS) for _ in range(3)]
    assert [isinstance(each, Lent) for each in held] == [True, True, False]
    assert {name: (array.shape, str(array.dtype)) for name, array in held[2].items()} == {
        "x": ((2, 3), "float32"),
        "a": ((), "int64"),
    }
    del held[0]
    assert isinstance(lender.lent(SPECS), Lent)


def test_to_close_gives_up_descriptors_and_leaves_the_arrays() -> None:
    lender, before = Lender(), descriptors()
    lent = lender.lent(SPECS)
    lender.close()
    lender.close()
    assert descriptors() == before + 1  # the map's own
    lent["x"][...] = 2.0
    assert lent["x"].sum() == 12.0
