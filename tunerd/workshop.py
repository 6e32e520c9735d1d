"""What the sessions of one model in one process share, so that only the first of them pays for it.

Most levels of a matrix are searches of seconds; reading and lowering the model, starting Ray and
importing TVM in every tuner would take longer than they do.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from tunerd import host, preparation
from tunerd.cluster.actors import Cluster
from tunerd.models.model import FixedModel
from tunerd.vocabulary import Build, Candidate, TargetSpec

_Asked = tuple[TargetSpec, preparation.Selection | None]


class Workshop:
    """A model, its kernels for each target, and a private cluster with its tuners."""

    def __init__(self, model: FixedModel) -> None:
        self.model = model
        self.run = f"{model.name}-{int(time.time())}-{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None
        self._kernels: dict[_Asked, preparation.Kernels] = {}
        self._builds: dict[tuple[TargetSpec, str], Build] = {}  # a candidate's id names no target
        self._lock = threading.Lock()  # of `_kernels`: a session lowers in a thread

    def kernels(
        self, target: TargetSpec, selection: preparation.Selection | None = None
    ) -> preparation.Kernels:
        """Simplify and lower the model and extract its tasks, or some of them, once.

        Raises as `preparation.kernels_of` does.
        """
        asked = (target, selection)
        with self._lock:
            if asked not in self._kernels:
                self._kernels[asked] = preparation.kernels_of(self.model, target, selection)
            return self._kernels[asked]

    def keep(self, target: TargetSpec, builds: Iterable[Build]) -> None:
        """Keep what a session has built, for those that build for the same target after it."""
        self._builds |= {(target, b.candidate.candidate_id): b for b in builds}

    def build_of(self, target: TargetSpec, candidate: Candidate) -> Build | None:
        return self._builds.get((target, candidate.candidate_id))

    @contextlib.contextmanager
    def cluster(self, layout: preparation.Layout, *, logs: Path) -> Iterator[Cluster]:
        """Lend the cluster to one session; its slices are closed when that ends."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(
                Cluster(
                    address=None,
                    run=self.run,
                    cpus=host.facts().usable_cores,
                    gpus=len({s.gpu_uuid for s, _ in layout.slices if s.gpu_uuid}),
                    logs=logs,
                )
            )
        yield self._cluster
        self._cluster.end_session()

    def end_cluster(self) -> None:
        """End the cluster: nothing of it runs beside what is measured now."""
        self._cluster = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster = None
        self._stack.__exit__(*error)
