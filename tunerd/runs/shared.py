"""What the sessions of one process share, so that only the first of them pays for it.

Most levels of a matrix, and some sizes of a model, are searches of seconds; reading and lowering
the model, starting Ray and importing TVM in every tuner would take longer than they do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from tunerd.cluster.layout import Layout
from tunerd.cluster.ray_cluster import Cluster
from tunerd.frontend.kernels import Kernels
from tunerd.frontend.model import FixedModel
from tunerd.frontend.process import Lowerer, Lowering
from tunerd.system import host
from tunerd.vocabulary import Build, Candidate, TargetSpec


def run_name(model: FixedModel) -> str:
    """Name the runs of a model in this process, apart from all others of its user."""
    return f"{model.name}-{int(time.time())}-{os.getpid()}"


class SharedCluster:
    """A private cluster on this machine, which the first session starts; its tuners stay for the
    next ones. For one session at a time; close it, or use it as a context manager.
    """

    def __init__(self) -> None:
        self.run = ""  # of the first session
        self._stack = contextlib.ExitStack()
        self._cluster: Cluster | None = None

    @property
    def is_up(self) -> bool:
        return self._cluster is not None

    @contextlib.contextmanager
    def lent(self, run: str, layout: Layout, *, logs: Path) -> Iterator[Cluster]:
        """Lend the cluster to a session, and close its slices when that ends."""
        if self._cluster is None:
            self.run = run
            self._cluster = self._stack.enter_context(
                Cluster(
                    address=None,
                    run=run,
                    cpus=host.facts().usable_cores,
                    gpus=len({s.gpu_uuid for s, _ in layout.slices if s.gpu_uuid}),
                    logs=logs,
                )
            )
        yield self._cluster
        self._cluster.end_session()

    def close(self) -> None:
        """End the cluster. Idempotent; a later session starts another one."""
        self._cluster = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._cluster = None
        self._stack.__exit__(*error)


class SharedResources:
    """A model, its kernels for each target, and a cluster with its tuners.

    Args:
        lowerer: a process for the first lowering, if one was started already.
        joined: a cluster of others, which they close.
        private: a private one of others, likewise; where there is none, one of its own is started.
    """

    def __init__(
        self,
        model: FixedModel,
        lowerer: Lowerer | None = None,
        *,
        joined: Cluster | None = None,
        private: SharedCluster | None = None,
    ) -> None:
        self.model = model
        self._lowerer = lowerer
        self.joined = joined
        self._stack = contextlib.ExitStack()
        self._private = private or self._stack.enter_context(SharedCluster())
        self.run = self._private.run or run_name(model)
        self._lowerings: dict[TargetSpec, Lowering] = {}
        self._builds: dict[tuple[TargetSpec, str], Build] = {}  # a candidate's id names no target

    def lower(self, target: TargetSpec) -> Lowering:
        """Begin to simplify and lower the model, and to extract its tasks, once."""
        known = self._lowerings.get(target)
        if known is None or known.problem is not None:
            lowerer, self._lowerer = self._lowerer, None
            self._lowerings[target] = Lowering(self.model, target, lowerer=lowerer)
        return self._lowerings[target]

    def kernels(self, target: TargetSpec) -> Kernels:
        """Return what `lower` makes; raises as its result does."""
        return self.lower(target).result()

    def keep(self, target: TargetSpec, builds: Iterable[Build]) -> None:
        """Keep what a session has built, for those that build for the same target after it."""
        self._builds |= {(target, b.candidate.candidate_id): b for b in builds}

    def build_of(self, target: TargetSpec, candidate: Candidate) -> Build | None:
        return self._builds.get((target, candidate.candidate_id))

    @contextlib.contextmanager
    def cluster(self, layout: Layout, *, logs: Path) -> Iterator[Cluster]:
        """Lend the cluster to one session; slices of a private one are closed when that ends."""
        if self.joined is not None:
            yield self.joined
        else:
            with self._private.lent(self.run, layout, logs=logs) as cluster:
                yield cluster

    def end_cluster(self) -> None:
        """End the cluster: nothing of it runs beside what is measured now."""
        self._private.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            for lowering in self._lowerings.values():
                lowering.close()
        finally:  # a second Ctrl-C may come first
            self._stack.__exit__(*error)
