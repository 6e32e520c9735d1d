"""Engines of scripted models, and what their answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from tests.lib.colocation_plans import Script
from tunerd.colocation import Engine
from tunerd.colocation.places.in_process import InProcessPlace
from tunerd.colocation.plan import Plan
from tunerd.vocabulary import Arrays

WAIT_SECS = 60
TWO: dict[str, dict[str, object]] = {"one": {}, "two": {}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("members")


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    for gate in script.gates.values():  # nobody waits after the test
        gate.set()


def engine_of(script: Script, plan: Plan) -> Engine:
    return Engine(plan, place=InProcessPlace(script.open_model))


def result(future: Future[Arrays]) -> Arrays:
    return future.result(WAIT_SECS)


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)
