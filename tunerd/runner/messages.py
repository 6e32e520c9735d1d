"""Values as the JSON and the blobs of a message, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunerd.system.codec import specs_from
from tunerd.vocabulary import Build, Candidate, Failure, Kind, Profile, Stage, to_json


def build_to(build: Build) -> dict[str, Any]:
    """Describe a build; its library travels as a blob."""
    return {
        "task_id": build.candidate.task_id,
        "candidate_id": build.candidate.candidate_id,
        "source": build.candidate.source,
        "library_sha256": build.library_sha256,
        "build_secs": build.build_secs,
        "args": to_json(build.args),
        "weight_args": list(build.weight_args),
        "compiler": build.compiler,
        "rewritten": to_json(build.rewritten),
    }


def build_from(entry: dict[str, Any], library: bytes) -> Build:
    candidate = Candidate(entry["task_id"], entry["candidate_id"], entry["source"])
    return Build(
        candidate=candidate,
        library=library,
        library_sha256=entry["library_sha256"],
        build_secs=entry["build_secs"],
        args=specs_from(entry["args"]),
        weight_args=tuple(entry["weight_args"]),
        compiler=entry["compiler"],
        rewritten=tuple((argument, tuple(axes)) for argument, axes in entry["rewritten"]),
    )


def profile_from(entry: dict[str, Any]) -> Profile:
    return Profile(**entry)


def result_to(result: tuple[int, Sequence[float]] | Failure) -> dict[str, Any]:
    """Describe calls per sample with the samples, or a failure."""
    if isinstance(result, Failure):
        return {"failure": to_json(result)}
    calls, samples = result
    return {"calls": calls, "run_secs": list(samples)}


def failure_from(entry: dict[str, Any]) -> Failure:
    return Failure(Stage(entry["stage"]), Kind(entry["kind"]), entry["message"])
