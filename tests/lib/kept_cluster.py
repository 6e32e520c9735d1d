"""One private cluster for the runs of a test process that judge other things than its start.

A run of this process finds it as a session of a matrix finds that of the session before it: Ray is
there, and so are tuners for the same target. Slices are the run's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tunerd.api import matrices, tuning
from tunerd.cluster.ray_cluster import Cluster
from tunerd.runs import shared


@contextlib.contextmanager
def kept_cluster() -> Iterator[None]:
    """Lend the first private cluster that a run starts to all runs until the block ends."""
    kept: list[Cluster] = []
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @contextlib.contextmanager
        def lend(**wanted: Any) -> Iterator[Cluster]:
            assert wanted["gpus"] == 0
            if not kept:
                kept.append(stack.enter_context(Cluster(**wanted)))
            try:
                yield kept[0]
            finally:
                kept[0].end_session()

        patch.setattr(shared, "Cluster", lend)
        for module in (matrices, tuning):
            patch.setattr(module, "require_no_ray", lambda: None)  # it is ours
        yield
