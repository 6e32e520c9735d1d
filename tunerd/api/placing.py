"""Place models and tuning runs on the devices of this machine, or of a Ray cluster."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from tunerd.api.run import OnStep, StrPath, nothing
from tunerd.colocation.placement.fleet import Fleet, here
from tunerd.colocation.placement.host import Host
from tunerd.colocation.placement.job_file import JobFile
from tunerd.colocation.placement.placing import Foreseen, Placed, Placing, foresee
from tunerd.colocation.placement.policies import POLICIES
from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.policies.estimated import Estimated, estimate_from
from tunerd.errors import InputError, Interrupted

_CLOSE_SECS = 150.0  # of a machine: tuning runs drain and save


def colocate_place(
    jobs: StrPath,
    *,
    policy: str = Estimated.kind,
    address: str | None = None,
    grace_secs: float | None = None,
    out: StrPath | None = None,
    on_step: OnStep | None = None,
) -> Placed:
    """Place the jobs of a file, start each where it was placed, and wait for all of them.

    The same call in the same folder goes on: jobs that came to a good end are not run again.

    Args:
        policy: exclusive, round-robin, least-utilised, most-free-memory or estimated.
        address: of a Ray cluster, whose nodes' devices are used; this machine's if not given.
        grace_secs: instead of the file's.
        out: the folder; placements/NAME if not given.

    Raises TunerdError, and Interrupted after SIGINT or SIGTERM, when all that ran was ended.
    """
    from tunerd.runs.folder import locked
    from tunerd.system.files import disk_errors_said
    from tunerd.system.signals import Stop

    file, chosen = _read(jobs, grace_secs), _known(policy)
    path = Path(os.path.abspath(os.fspath(jobs)))
    folder = (
        Path(os.path.abspath(out)) if out is not None else Path.cwd() / "placements" / path.stem
    )
    say = on_step or nothing
    with disk_errors_said(folder), locked(folder), Stop() as stop, _fleet(file, address) as fleet:

        def go_on(message: str) -> None:
            if stop.requested:
                raise Interrupted(
                    "stopped on request; what ran was ended, and the same command goes on"
                )
            say(message)

        made = _policy(chosen, file, fleet)
        return Placing(file, fleet, made, folder=path.parent, out=folder, say=go_on).run()


def foresee_place(
    jobs: StrPath,
    *,
    policy: str = Estimated.kind,
    address: str | None = None,
    grace_secs: float | None = None,
) -> Foreseen:
    """Say where the jobs of a file would be placed if none came to its end; start nothing."""
    file, chosen = _read(jobs, grace_secs), _known(policy)
    with _fleet(file, address) as fleet:
        return foresee(file, fleet, _policy(chosen, file, fleet))


def _read(jobs: StrPath, grace_secs: float | None) -> JobFile:
    file = JobFile.read(os.fspath(jobs))
    return file if grace_secs is None else file.model_copy(update={"grace": grace_secs})


def _known(policy: str) -> str:
    if policy not in POLICIES:
        raise InputError(f"there is no policy '{policy}'; choose one of {', '.join(POLICIES)}")
    return policy


def _policy(kind: str, file: JobFile, fleet: Fleet) -> Policy:
    if kind != Estimated.kind:
        return POLICIES[kind]()
    from tunerd.colocation.planning.estimates import model_of
    from tunerd.colocation.planning.pairs import Pairs, read_pairs

    device = next(iter(fleet.devices.values())).model
    known = [p for path in file.pairs for p in read_pairs(path) if p.device == device]
    return Estimated(estimate_from(Pairs(known, device, model=model_of(known)[0])))


@contextlib.contextmanager
def _fleet(file: JobFile, address: str | None) -> Iterator[Fleet]:
    """Yield the devices of this machine or of a cluster, and end what runs there after it."""
    from tunerd.cluster.job import cluster_address

    joined = cluster_address(address)
    with contextlib.ExitStack() as stack:
        if joined is None:
            machines = here(Host(file.devices))
        else:
            from tunerd.cluster.node_objects import NodeObjects

            nodes = stack.enter_context(
                NodeObjects(
                    joined,
                    "place",
                    functools.partial(Host, file.devices),
                    with_gpus=file.devices == "gpus",
                )
            )
            machines = {
                node: functools.partial(nodes.call, node, limit_secs=_CLOSE_SECS)
                for node in nodes.nodes
            }
        fleet = Fleet(machines)
        stack.callback(fleet.close)
        yield fleet
