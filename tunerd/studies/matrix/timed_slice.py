"""A slice of a matrix, and how long it has worked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tunerd.slices.base import Slice
from tunerd.vocabulary import Arrays, Build, Failure, Measurement, Profile, SliceSpec

_T = TypeVar("_T")


class Worked:
    """A slice that has started. `secs` is the time of its calls; between them it is idle."""

    def __init__(self, one: Slice) -> None:
        self._slice = one
        self.secs = 0.0

    @property
    def spec(self) -> SliceSpec:
        return self._slice.spec

    def compare(self, builds: Sequence[Build], profile: Profile) -> list[Measurement | Failure]:
        return self._timed(lambda: self._slice.compare(builds, profile))

    def agree(self, reference: Build, build: Build) -> Failure | None:
        return self._timed(lambda: self._slice.agree(reference, build))

    def run_model(self, artifact: str, inputs: Arrays) -> Arrays:
        return self._timed(lambda: self._slice.run_model(artifact, inputs))

    def compare_models(
        self, artifacts: Sequence[str], profile: Profile
    ) -> list[Measurement | Failure]:
        return self._timed(lambda: self._slice.compare_models(artifacts, profile))

    def _timed(self, call: Callable[[], _T]) -> _T:
        since = time.monotonic()
        try:
            return call()
        finally:
            self.secs += time.monotonic() - since
