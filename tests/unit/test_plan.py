"""What a dry run shows people, for machines that are not at hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from tunerd.report.table import PLANNED_TASKS, plan_table

GPU = "GPU-0a1b2c3d-0000-0000-0000-000000000000"


def plan(tasks: int = 20, **changes: Any) -> dict[str, Any]:
    """Return the document of a plan for two slices of a GPU."""
    return {
        "out": "runs/net-gpu40",
        "model": {
            "name": "net",
            "digest": "d" * 64,
            "inputs": [{"name": "images", "shape": [1, 3, 224, 224], "dtype": "float32"}],
            "outputs": [{"name": "scores", "shape": [1, 1000], "dtype": "float32"}],
            "notes": ["2 Dropout nodes were removed"],
        },
        "tenants": None,
        "share_pct": 40,
        "target": json.dumps({"kind": "cuda", "arch": "sm_90", "mattr": ["-a", "-b"]}),
        "device": "NVIDIA H200",
        "bound": ["2 slices of 40% fit into each GPU"],
        "slices": [
            {
                "slice_id": f"mps-0-{i}",
                "kind": "mps",
                "pct": 40,
                "gpu_uuid": GPU,
                "cores": [],
                "environment": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"},
                "node_id": None,
            }
            for i in range(2)
        ],
        "tuners": [
            {"tuner_id": f"tuner-0-{i}", "cpus": 2, "cores": [], "node_id": None} for i in range(6)
        ],
        "tasks": [
            {"task_id": f"{i}", "name": f"kernel{i}", "weight": 1 + i, "flops": 1e6 * (20 - i)}
            for i in range(tasks)
        ],
        "warm_start": [{"sentence": "512 results of 26 tasks from runs/other"}],
        "trials": None,
        "budget_secs": None,
        "estimate_secs": None,
    } | changes


def shown(document: dict[str, Any], width: int = 160) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan_table(document))
    return console.export_text()


def test_a_plan_says_on_how_many_nodes_of_a_cluster() -> None:
    tuners = [{"tuner_id": f"t-{n}", "cpus": 1, "cores": [], "node_id": n} for n in "ab"]
    assert "2 of a Ray cluster" in shown(plan(tuners=tuners))
    assert "of a Ray cluster" not in shown(plan())


def test_a_plan_names_gpu_share_bound_environment_and_tuners() -> None:
    text = shown(plan())
    for said in (
        "runs/net-gpu40",
        "images float32[1,3,224,224]",
        "2 Dropout nodes were removed",
        "40% of NVIDIA H200",
        "cuda: arch sm_90, mattr -a -b",
        "2 slices of 40% fit into each GPU",
        GPU,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40",
        "6 processes on 12 CPUs",
        "512 results of 26 tasks from runs/other",
    ):
        assert said in text


def test_the_tasks_with_most_work_come_first_and_the_rest_is_counted() -> None:
    text = shown(plan())
    names = [word for word in text.split() if word.startswith("kernel")]
    assert len(names) == PLANNED_TASKS
    assert names[0] in ("kernel9", "kernel10")  # 10 x 11 MFLOP, more than any other
    assert "kernel0" not in names
    assert "and 5 lighter tasks" in text


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "tuned until little more can be gained; the time is not limited"),
        ({"trials": 2000, "estimate_secs": 300.0}, "tuned until 2,000 trials; about 5 min"),
        (
            {"trials": 1, "budget_secs": 90.0, "estimate_secs": 61.0},
            "until 1 trial or 1 min 30 s of search; about 1 min 01 s",
        ),
    ],
)
def test_a_plan_says_when_the_search_ends(limits: dict[str, Any], said: str) -> None:
    assert said in shown(plan(**limits))


def test_a_plan_without_tasks_can_be_shown() -> None:
    assert "0 tasks" in shown(plan(tasks=0))


@pytest.mark.parametrize("width", [1, 20, 60])
def test_a_plan_fits_a_narrow_terminal(width: int) -> None:
    assert max(len(line.rstrip()) for line in shown(plan(), width).splitlines()) <= width


def test_escapes_in_names_reach_no_terminal() -> None:
    document = plan(bound=["\x1b[31mred[/]"])
    document["model"]["name"] = "\x1b[2J[bold]"
    text = shown(document)
    assert "\x1b" not in text
    assert "[bold]" in text
