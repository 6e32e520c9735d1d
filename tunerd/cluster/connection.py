"""This process's way into Ray: a private cluster that it starts and ends, or one that it joins.

Ctrl-C reaches a terminal's whole process group. Ray starts its daemons with SIGINT blocked, which
workers and their children inherit, so only the driver hears it, and drains.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from tunerd.cluster import private_ray
from tunerd.cluster.ray_environment import (
    Environment,
    RayFolder,
    environment,
    environment_to_join,
    join,
    start_private,
)
from tunerd.cluster.reaper import Daemon, end_daemons, raylet_at, reaping

log = logging.getLogger(__name__)


class Connection:
    """Ray, initialised in this process until close(), which is idempotent.

    Args:
        address: HOST:PORT of a cluster, or "auto"; None starts a private one on this machine.
        run: tells this run from others on the same GPUs.
        cpus: of a private cluster; `gpus` likewise.
        logs: where a private cluster's logs are kept where it does not start.

    Raises InfrastructureError or HostError where Ray cannot be had.
    """

    def __init__(
        self, address: str | None, run: str, *, cpus: int, gpus: int, logs: Path | None
    ) -> None:
        self.daemons: tuple[Daemon, ...] = ()  # without which Ray has ended
        self._logs = logs
        self._stack = contextlib.ExitStack()  # what ends Ray and takes away what it had
        self.folder = RayFolder() if address is None else None  # of a private cluster
        if self.folder is not None:
            self._stack.callback(self.folder.close)
            variables = environment(run, self.folder)
        else:
            assert address is not None
            variables = environment_to_join(address, run)
        self._stack.callback(Environment(variables).undo)
        try:
            import ray

            self.ray = ray
            has_started = self._stack.enter_context(private_ray.messages_logged())
            private_ray.forget_token()
            with private_ray.handlers_kept():
                if self.folder is not None:
                    hold = self._stack.enter_context(reaping())
                    self._stack.callback(self._shut_down)
                    start_private(ray, self.folder, cpus=cpus, gpus=gpus, end_failed=end_daemons)
                    self.daemons = hold()
                elif address is not None:
                    self._stack.callback(self._shut_down)
                    join(ray, address, run)
                    self.daemons = raylet_at(self._own_raylet_socket())
            has_started()
        except BaseException as error:
            if self.folder is not None:
                self.keep_logs(error)
            self._stack.close()
            raise

    @property
    def scratch(self) -> str | None:
        """The folder for temporary files of a private cluster's actors."""
        return None if self.folder is None else str(self.folder.scratch)

    @property
    def is_up(self) -> bool:
        return bool(self.ray.is_initialized()) and all(d.alive for d in self.daemons)

    @property
    def node_id(self) -> str:
        """The node through which this process joined."""
        return str(self.ray.get_runtime_context().get_node_id())

    def on(self, node_id: str) -> Any:
        """Return what places an actor or a task on a node, and nowhere else."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node_id, soft=False)

    def keep_logs(self, error: BaseException | None) -> None:
        """Keep the cluster's logs, of a run that had a problem, and say where they are.

        error: what ends the run, which gets it as a note; without one it is logged.
        """
        if not (kept := self._keep_logs()):
            return
        if error is None:
            log.warning("the run lost a worker; %s", kept)
        elif kept not in getattr(error, "__notes__", ()):
            error.add_note(kept)

    def close(self) -> None:
        self._stack.close()

    def _keep_logs(self) -> str:
        """Keep the cluster's logs and say where; "" where there are none."""
        if self.folder is None:
            return "see the logs of Ray on its nodes, in /tmp/ray/session_latest/logs by default"
        try:
            if self._logs is None or not self.folder.keep_logs(self._logs):
                return ""
        except OSError as error:  # which may be the very problem that ends the run
            return f"the logs of Ray cannot be kept in {self._logs}: {error.strerror}"
        return f"the logs of Ray and its workers are in {self._logs}"

    def _own_raylet_socket(self) -> str:
        own = self.node_id
        (socket,) = (n["RayletSocketName"] for n in self.ray.nodes() if n["NodeID"] == own)
        return str(socket)

    def _shut_down(self) -> None:
        if self.ray.is_initialized():
            with private_ray.handlers_kept():
                self.ray.shutdown()


def gpu_ids(_: object) -> tuple[str, ...]:
    """Return the GPUs that Ray gave the actor in which this runs, as its node numbers them."""
    import ray

    return tuple(str(gpu) for gpu in ray.get_gpu_ids())
