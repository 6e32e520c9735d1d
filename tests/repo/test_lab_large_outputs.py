"""The lab's GPU whose times are simulated: what runs on it has all parts of its latency."""

from __future__ import annotations

from pathlib import Path

from lab.colocation import large_outputs, request_parts
from lab.colocation.simulated import make_artifact
from lab.colocation.timed_gpu import copy_secs, timed_place

GRAPH_SECS = 2e-3


def test_a_long_model_takes_its_graph_and_its_copies_on_a_gpu_of_simulated_times(
    tmp_path: Path,
) -> None:
    short = make_artifact(tmp_path / "short", 8, layer="GlobalAveragePool")
    side = 640
    long = make_artifact(tmp_path / "long", side)  # whose copies are in parts
    times = {short: (1e-4, large_outputs.SHORT_PCT), long: (GRAPH_SECS, 75)}
    plan = large_outputs.plan_of(short, long, "space", rate=100.0, secs=0.4)
    found = request_parts.measured(plan, secs=0.4, turns=1, place=lambda: timed_place(times))
    for way in request_parts.WAYS:
        of = found[f"all, {way}"]
        assert of["short"]
        assert of["long"]
        assert min(each["device"] for each in of["long"]) >= 1e6 * GRAPH_SECS
        least_secs = GRAPH_SECS + 2 * copy_secs(3 * side * side * 4)
        assert min(each["all"] for each in of["long"]) >= 1e6 * least_secs
