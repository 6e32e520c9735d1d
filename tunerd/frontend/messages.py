"""What a `Lowering` asks and is told, as the JSON and the blobs of messages, and back.

It is told what was extracted first: a search can begin while the weights are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tunerd.frontend.kernels import Extracted, Kernels
from tunerd.frontend.model import FixedModel
from tunerd.frontend.relax.lowering import Lowered
from tunerd.system.codec import arrays_from, arrays_to, specs_from
from tunerd.vocabulary import Model, TargetSpec, Task, to_json

Message = tuple[dict[str, Any], list[bytes]]


def asked_to(model: FixedModel, target: TargetSpec) -> Message:
    body = {"model": to_json(model), "target": to_json(target)}
    return body, [model.proto.SerializeToString()]


def asked_from(body: dict[str, Any], blobs: Sequence[bytes]) -> tuple[FixedModel, TargetSpec]:
    (proto,) = blobs
    model = FixedModel(**_model_from(body["model"], "inputs"), proto=_proto_from(proto))
    return model, TargetSpec(**body["target"])


def extracted_to(extracted: Extracted) -> dict[str, Any]:
    tasks = [asdict(task) for task in extracted.tasks]
    return {"tasks": tasks, "touched_bytes": extracted.touched_bytes}


def extracted_from(body: dict[str, Any]) -> Extracted:
    return Extracted(tuple(_task_from(entry) for entry in body["tasks"]), body["touched_bytes"])


def kernels_to(kernels: Kernels) -> Message:
    """Return what `kernels` are beyond what was extracted."""
    lowered = kernels.lowered
    weights, blobs = arrays_to(lowered.weights)
    body = {
        "model": to_json(kernels.model),
        "lowered": {
            "mod_json": lowered.mod_json,
            "num_inputs": lowered.num_inputs,
            "notes": lowered.notes,
        },
        "weights": weights,
    }
    return body, [kernels.model.proto.SerializeToString(), *blobs]


def kernels_from(extracted: Extracted, body: dict[str, Any], blobs: Sequence[bytes]) -> Kernels:
    proto, *weights = blobs
    lowered = body["lowered"]
    return Kernels(
        extracted.tasks,
        extracted.touched_bytes,
        Model(**_model_from(body["model"], "inputs", "outputs"), proto=_proto_from(proto)),
        Lowered(
            lowered["mod_json"],
            arrays_from(body["weights"], weights),
            lowered["num_inputs"],
            tuple(lowered["notes"]),
        ),
    )


def _model_from(entry: dict[str, Any], *tensors: str) -> dict[str, Any]:
    return {**entry, "notes": tuple(entry["notes"]), **{t: specs_from(entry[t]) for t in tensors}}


def _task_from(entry: dict[str, Any]) -> Task:
    return Task(
        **{
            **entry,
            "args": specs_from(entry["args"]),
            "weight_args": tuple(entry["weight_args"]),
            "target": TargetSpec(**entry["target"]),
        }
    )


def _proto_from(blob: bytes) -> Any:
    import onnx

    return onnx.ModelProto.FromString(blob)
