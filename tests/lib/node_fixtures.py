"""Nodes and their slices, as surveys would find them."""

from __future__ import annotations

from pathlib import Path

from tunerd.cluster.nodes import Node, Survey
from tunerd.settings import TuneSettings
from tunerd.slices.base import Plan
from tunerd.vocabulary import SliceSpec, TargetSpec

TARGET = TargetSpec("llvm", '{"kind": "llvm"}')


def cpu_slices(*core_sets: tuple[int, ...]) -> tuple[SliceSpec, ...]:
    return tuple(
        SliceSpec(f"cpu-0-{i}", "cpu", 50, cores=cores, lane=f"cores-{cores}")
        for i, cores in enumerate(core_sets)
    )


def gpu_slices(*gpus: int, each: int = 2) -> tuple[SliceSpec, ...]:
    return tuple(
        SliceSpec(f"mps-{g}-{i}", "mps", 40, device_index=g, gpu_uuid=f"GPU-{g}")
        for g in gpus
        for i in range(each)
    )


def node(
    node_id: str,
    slices: tuple[SliceSpec, ...] = (),
    *,
    machine: str = "m0",
    cpus: int = 4,
    is_here: bool = False,
    is_driver: bool = False,
) -> Node:
    plan = Plan(slices, TARGET, "a bound", problem="" if slices else "no device")
    survey = Survey(f"host-{node_id}", machine, 4, "a device", plan)
    return Node(node_id, cpus, survey, is_here, is_driver)


def settings(**values: object) -> TuneSettings:
    given = {"model": Path("m.onnx"), "out": Path("out"), "cpu_pct": 50, "slice_kind": "cpu"}
    return TuneSettings.model_validate(given | values)
