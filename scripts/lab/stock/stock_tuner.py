#!/usr/bin/env python3
"""Tune some tasks of a model with TVM's own tuner, as it comes, and write when each record came.

    scripts/lab/stock/stock_tuner.py MODEL --cpu-pct 50 --tasks ID,ID --out RECORDS.jsonl \
        --work FOLDER

`meta_schedule.tune_tasks` with its local builder and runner, its evolutionary search, its XGBoost
model and its way of measuring. Two things are set: search and builds get every core that this
process may use, and the runner's worker the share of one of tunerd's slices. On a CPU that is an
affinity; on a GPU this process must be a client of an MPS daemon already, and nothing is tuned
unless the worker sees the share's SMs. The tasks are lowered by tunerd, as for tunerd itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from tunerd.cluster.layout import local_layout
from tunerd.errors import HostError, TunerdError
from tunerd.frontend.kernels import Selection, kernels_of
from tunerd.runs import plan
from tunerd.settings import TuneSettings
from tunerd.system import host
from tunerd.vocabulary import SliceSpec, TargetSpec, Task, to_json


def target_of_tvm(target: TargetSpec) -> TargetSpec:
    """Return a target of tunerd's without the level that it has LLVM work at."""
    description = json.loads(target.json)
    description.pop("opt-level", None)
    return TargetSpec(target.kind, json.dumps(description, sort_keys=True))


def pin(cores: tuple[int, ...]) -> None:
    """Keep a fresh worker on these cores, kernels included. Runs in the worker."""
    import os

    import tvm

    os.sched_setaffinity(0, cores)
    # -2: one thread per listed core (TVM's threading_backend.h); its default is the first cores.
    configure = tvm.get_global_func("runtime.config_threadpool")
    configure(-2, len(cores), [str(core) for core in cores])


def cores_of_worker() -> list[int]:
    import os

    return sorted(os.sched_getaffinity(0))


def client_facts() -> dict[str, Any]:
    """Return what a worker sees of its GPU. Runs in the worker."""
    from tunerd.runner.cuda_device import CudaDevice

    return CudaDevice().facts()


def require_share(most_sms: int) -> None:
    """Refuse to work outside of MPS or with more SMs. Runs in each fresh worker."""
    import os

    from tunerd.runner.cuda_device import CudaDevice

    facts = CudaDevice().facts()
    if not facts["mps_enabled"] or facts["sm_count"] > most_sms:
        print(f"the worker is not under its share: {facts}", flush=True)
        os._exit(1)


def runner_for(spec: SliceSpec) -> tuple[Any, dict[str, Any]]:
    """Return TVM's local runner under the share of `spec`, and what its worker obtained.

    Raises HostError where that is not the share.
    """
    from tvm.s_tir.meta_schedule.runner import LocalRunner

    if spec.cores:
        runner = LocalRunner(initializer=functools.partial(pin, spec.cores))
        cores = runner.pool.submit(cores_of_worker).result()
        if tuple(cores) != spec.cores:
            raise HostError(f"the worker asked for the cores {spec.cores} and got {cores}")
        return runner, {"mechanism": "affinity", "cores": cores}
    from tunerd.slices.mps.mps_slice import proof_of

    probe = LocalRunner()
    facts = probe.pool.submit(client_facts).result()
    proof = proof_of(spec, facts | {"pid": 0}, listed=None)
    del probe
    runner = LocalRunner(initializer=functools.partial(require_share, proof.sm_count))
    return runner, to_json(proof)


def context_of(task: Task, *, logger: Any, rand_state: int, threads: int) -> Any:
    """Make a task's context as TVM's `extracted_tasks_to_tune_contexts` does."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    return ms.TuneContext(
        mod=tvm.ir.load_json(task.mod_json),
        target=tvm.target.Target(task.target.json),
        space_generator="post-order-apply",
        search_strategy="evolutionary",
        task_name=task.name,
        logger=logger,
        rand_state=rand_state,
        num_threads=threads,
    ).clone()


def noted_in(out: Any, tasks: list[Task], started_at: float) -> Any:
    """Return a callback that writes a batch's records as soon as they are measured."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.measure_callback import PyMeasureCallback

    from tunerd.vocabulary import candidate_id

    @derived_object
    class Noted(PyMeasureCallback):  # type: ignore[misc]
        def apply(
            self, scheduler: Any, number: int, candidates: Any, builds: Any, results: Any
        ) -> None:
            at_secs = time.time() - started_at
            for candidate, build, result in zip(candidates, builds, results, strict=True):
                trace = json.dumps(plain(candidate.sch.trace.as_json()), separators=(",", ":"))
                task_id = tasks[number].task_id
                secs = None if result.run_secs is None else [float(s) for s in result.run_secs]
                error = build.error_msg or result.error_msg
                record = {
                    "at_secs": at_secs,
                    "task_id": task_id,
                    "candidate_id": candidate_id(task_id, trace),
                    "run_secs": secs,
                    "error": str(error)[-500:] if error else None,
                    "trace": trace,
                }
                out.write(json.dumps(record) + "\n")
            out.flush()

    return Noted()


def plain(value: Any) -> Any:
    """Return TVM's containers as Python's."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "items"):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "value"):
        return value.value
    return [plain(v) for v in value]


def tune(options: argparse.Namespace, out: Any) -> None:
    settings = settings_of(options)
    layout = local_layout(settings)
    selection = Selection(tuple(options.tasks.split(",")), options.trials_per_task)
    model = plan.read(settings)
    target = target_of_tvm(layout.target)
    tasks = list(selection.among(kernels_of(model, target).tasks))
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.logging import get_loggers_from_work_dir
    from tvm.s_tir.meta_schedule.utils import fork_seed

    threads = host.facts().usable_cores
    runner, obtained = runner_for(layout.slices[0][0])
    got = {
        "search_threads": threads,
        "build_workers": threads,
        "build_and_search_cores": sorted(os.sched_getaffinity(0)),
        "measuring": obtained,
        "evaluator": runner.evaluator_config._asdict(),
        "target": target.json,
        "batch": options.batch,
        "packages": {p: importlib.metadata.version(p) for p in ("apache-tvm", "apache-tvm-ffi")},
    }
    out.write(json.dumps({"got": got}) + "\n")
    out.flush()
    loggers = get_loggers_from_work_dir(str(options.work), [t.name for t in tasks])
    seeds = fork_seed(options.seed, n=len(tasks))
    contexts = [
        context_of(task, logger=logger, rand_state=seed, threads=threads)
        for task, logger, seed in zip(tasks, loggers, seeds, strict=True)
    ]
    ms.tune_tasks(
        tasks=contexts,
        task_weights=[float(t.weight) for t in tasks],
        work_dir=str(options.work),
        max_trials_global=options.trials_per_task * len(tasks),
        max_trials_per_task=options.trials_per_task,
        num_trials_per_iter=options.batch,
        runner=runner,
        # First: the time that the others take is not counted against the records.
        measure_callbacks=[
            noted_in(out, tasks, options.started_at),
            *ms.MeasureCallback.create("default"),
        ],
    )


def settings_of(options: argparse.Namespace) -> TuneSettings:
    kind: Literal["cpu", "mps"] = "cpu" if options.cpu_pct is not None else "mps"
    return TuneSettings(
        model=options.model,
        out=options.work,
        cpu_pct=options.cpu_pct,
        gpu_pct=options.gpu_pct,
        slice_kind=kind,
        seed=options.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    share = parser.add_mutually_exclusive_group(required=True)
    share.add_argument("--cpu-pct", type=int)
    share.add_argument("--gpu-pct", type=int)
    parser.add_argument("--tasks", required=True, help="ids, with commas between them")
    parser.add_argument("--trials-per-task", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each record")
    parser.add_argument("--work", type=Path, required=True, help="TVM's work_dir")
    parser.add_argument("--started-at", type=float, default=time.time(), help="in epoch seconds")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as out:
        try:
            tune(options, out)
        except TunerdError as error:
            sys.exit(f"{parser.prog}: {error}")
        end = {"ended": "complete", "secs": time.time() - options.started_at}
        out.write(json.dumps(end) + "\n")


if __name__ == "__main__":
    main()
