"""Write the config.pbtxt with which Triton serves a plan: triton_config.py PLAN [NAME].

The members of a plan are one model of Triton's, because one engine has the GPU: a request says in
its parameter `member` which one it is for. Its tensors have one axis more than the member's, the
first, which Triton calls the batch: as many inferences. Requests of any members may come together
in one batch (`allow_ragged_batch`), and what some members do not take is `optional`.

Fields are those of protobuf/model_config.proto, and mean what it says of them, at the branch r23.10
of https://github.com/triton-inference-server/common; r26.06 has the same names. A group of
instances of KIND_GPU that names no `gpus` has, as it says, `count` of them on each GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from open_inference import datatype_of

from tunerd.colocation import Plan, artifacts
from tunerd.colocation.groups import groups_of, kernels_of
from tunerd.errors import InputError, TunerdError
from tunerd.vocabulary import TensorSpec

MAX_BATCH = 64  # inferences that Triton hands to the engine at once


def config_of(plan_path: Path | str, name: str = "members") -> str:
    """Return the text of a config.pbtxt. InputError where members differ too much for one model."""
    plan = Plan.read(plan_path)
    kernels = kernels_of(plan.members, groups_of(plan.members, 1))
    inputs = {name: artifacts.inputs_of(path) for name, path in kernels.items()}
    outputs = {name: artifacts.outputs_of(path) for name, path in kernels.items()}
    kind = "KIND_GPU" if plan.device == "cuda" else "KIND_CPU"
    return "\n".join(
        [
            f"name: {json.dumps(name)}",
            'backend: "python"',
            f"max_batch_size: {MAX_BATCH}",
            "dynamic_batching { }",
            "model_transaction_policy { decoupled: false }",
            f"instance_group [ {{ kind: {kind} count: 1 }} ]",
            _parameter("plan", str(Path(plan_path).absolute())),
            *(_tensor("input", *each, len(inputs)) for each in _by_name(inputs).items()),
            *(_tensor("output", *each, len(outputs)) for each in _by_name(outputs).items()),
            "",
        ]
    )


def _parameter(key: str, value: str) -> str:
    return f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(value)} }} }}"


def _by_name(of: Mapping[str, Iterable[TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    found: dict[str, dict[str, TensorSpec]] = {}
    for member, specs in of.items():
        for spec in specs:
            found.setdefault(spec.name, {})[member] = spec
    return found


def _tensor(role: str, name: str, of: Mapping[str, TensorSpec], members: int) -> str:
    (first, spec), *others = of.items()
    dims = list(spec.shape)
    for member, other in others:
        if (other.dtype, len(other.shape)) != (spec.dtype, len(spec.shape)):
            raise InputError(
                f"{role} '{name}' is {spec.dtype}{list(spec.shape)} of {first} and "
                f"{other.dtype}{list(other.shape)} of {member}; give them plans of their own, or "
                "rename it in one of the two"
            )
        dims = [a if a == b else -1 for a, b in zip(dims, other.shape, strict=True)]
    said = [f"name: {json.dumps(name)}", f"data_type: TYPE_{datatype_of(spec.dtype)}"]
    said.append(f"dims: {dims or [1]}")
    if not dims:  # a scalar: Triton wants an axis besides the batch's
        said.append("reshape: { shape: [ ] }")
    if role == "input":
        said.append("allow_ragged_batch: true")
        said += ["optional: true"] * (len(of) < members)
    return f"{role} [ {{ {' '.join(said)} }} ]"


if __name__ == "__main__":
    try:
        print(config_of(*sys.argv[1:3]), end="")
    except TunerdError as error:
        sys.exit(str(error))
