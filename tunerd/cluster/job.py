"""`tunerd` as the entry point of a Ray job: which cluster is meant, and what is lost with the job.

Ray runs an entry point on a node of the cluster, by default the head, with

    RAY_ADDRESS                  HOST:PORT of the cluster
    RAY_JOB_CONFIG_JSON_ENV_VAR  what `ray.init` takes over: the job's runtime environment

in its environment, and in a copy of its --working-dir, which Ray removes after the job
(ray/dashboard/modules/job/job_supervisor.py and ray/_private/runtime_env of Ray 2.60).
"""

from __future__ import annotations

import os
from pathlib import Path

from tunerd.errors import InputError

LOCAL = "local"
AUTO = "auto"
_ADDRESS = "RAY_ADDRESS"
_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_PACKAGE = "_ray_pkg_"  # what Ray calls its copies of working directories


def in_job() -> bool:
    """Say whether a Ray job has started this process."""
    return _IN_A_JOB in os.environ


def cluster_address(given: str | None) -> str | None:
    """Return the address of the Ray cluster that --address means, None for a private one.

    A job works in its own cluster. Elsewhere a cluster is only joined where that was asked for:
    RAY_ADDRESS may be there for `ray job submit`, and then names a dashboard.
    """
    if given == LOCAL or (given is None and not in_job()):
        return None
    if given in (None, AUTO):
        return os.environ.get(_ADDRESS) or AUTO
    return given


def require_kept(out: Path) -> None:
    """Raise InputError where a job's run folder would be lost with the job."""
    if not in_job():
        return
    if out.is_absolute() and not any(p.startswith(_PACKAGE) for p in out.resolve().parts):
        return
    raise InputError(
        f"--out {out} is in the folder that Ray made for this job, and may be gone after it; give "
        "an absolute path on a file system that the nodes share"
    )
