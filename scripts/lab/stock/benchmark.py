#!/usr/bin/env python3
"""Compare tunerd with TVM's own tuner: same host, share, tasks and trials for each task.

    scripts/lab/stock/benchmark.py MODEL.onnx --cpu-pct 50 --out FOLDER
    scripts/lab/stock/benchmark.py MODEL.onnx --gpu-pct 40 --out FOLDER

For each seed both tuners run in turn, each in a fresh process whose start-up counts. Then the best
candidate of every task, run and tuner, and the default schedule, are measured again in one quiet
slice, in turns. Writes FOLDER/benchmark.json and benchmark.svg and prints a table. What is finished
in FOLDER is not run again. lab/data/benchmark_tasks.json has the tasks; on a host with several
GPUs choose one with CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuda.pathfinder import load_nvidia_dynamic_lib

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.lab import search, write
from lab.stock import stock_tuner as stock
from lab.stock import summary
from tunerd.builder import nvrtc
from tunerd.cluster.layout import Layout, local_layout
from tunerd.errors import InputError, TunerdError
from tunerd.frontend.kernels import Selection, kernels_of
from tunerd.runs import plan
from tunerd.settings import TuneSettings, parse_duration
from tunerd.system import host
from tunerd.system.without_torch import keep_torch_from_tvm
from tunerd.vocabulary import METASCHEDULE, Candidate, Measurement, SliceSpec, Task, to_json

HERE = Path(__file__).resolve().parent
TASK_LISTS = HERE.parent / "data" / "benchmark_tasks.json"
TUNERS = ("stock", "tunerd")
GUARD_SECS = 30.0  # for a guard without leases to end
Run = dict[str, Any]


# --- what is compared --------------------------------------------------------------------------


def settings_of(options: argparse.Namespace, out: Path, seed: int = 0) -> TuneSettings:
    return TuneSettings(
        model=options.model,
        out=out,
        cpu_pct=options.cpu_pct,
        gpu_pct=options.gpu_pct,
        slice_kind="cpu" if options.gpu_pct is None else "mps",
        seed=seed,
    )


def chosen(
    wanted: str | None, listed: Sequence[Mapping[str, Any]], tasks: Sequence[Task]
) -> list[Task]:
    """Return the tasks to tune: the list's, its first few, or those that are named by their ids.

    A model without a list has its tasks in the order of the work that they are. InputError where a
    task of the list is not in the model, or is called another number of times.
    """
    known = {t.task_id: t for t in tasks}
    if wanted and not wanted.isdecimal():
        ids = wanted.split(",")
    elif listed:
        ids = [entry["task_id"] for entry in listed]
    else:
        ids = [t.task_id for t in sorted(tasks, key=lambda t: -t.weight * t.flops)]
        wanted = wanted or "4"
    if wanted and wanted.isdecimal():
        ids = ids[: int(wanted)]
    weights = {entry["task_id"]: entry["weight"] for entry in listed}
    for task_id in ids:
        if task_id not in known:
            raise InputError(f"the model has no task {task_id}; --tasks takes {', '.join(known)}")
        weight = known[task_id].weight
        if weights.get(task_id, weight) != weight:
            raise InputError(f"the model calls {task_id} {weight} times, not as its list says")
    return [known[task_id] for task_id in ids]


def lists_of(model: str, target: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TASK_LISTS.read_text()).get(model, {}).get(target, [])
    return found


# --- a run of either tuner ---------------------------------------------------------------------


@contextlib.contextmanager
def share(spec: SliceSpec, scratch: Path) -> Iterator[tuple[dict[str, str], Callable[[], None]]]:
    """Yield the environment of a capped client of this GPU's MPS daemon, and what ends its clients.

    Both are empty on CPUs. Clients are ended before their processes are killed.

    The daemon lives under tunerd's guard of the GPU, as for its slices, so that no other run of
    this user is measured beside it.
    """
    if spec.gpu_uuid is None:
        yield {}, lambda: None
        return
    from tunerd.slices.mps.control import MpsControl
    from tunerd.slices.mps.guard_client import Lease, gpu_folder
    from tunerd.slices.mps.mps_slice import run_name
    from tunerd.system.processes import ProcessId

    folder = gpu_folder(spec.gpu_uuid)
    control = MpsControl(folder / "pipe", folder / "log", spec.gpu_uuid)
    lease = Lease.acquire(spec.gpu_uuid, run_name())

    def end_clients() -> None:
        for server in control.servers() or ():
            for client in control.clients(server) or ():
                control.terminate(server, client)

    try:
        environment = dict(spec.environment) | cuda_environment(scratch)
        yield environment | {"CUDA_MPS_LOG_DIRECTORY": str(control.log_folder)}, end_clients
    finally:
        guard = ProcessId.of(lease.guard_pid)
        lease.close()
        if guard is not None:  # whoever comes next shall not wait for its end
            guard.wait(GUARD_SECS)


def cuda_environment(scratch: Path) -> dict[str, str]:
    """Return what TVM needs to find cudart and the headers of the wheels, which it looks for as in
    a toolkit of NVIDIA's installer: NVRTC is told `include` and `targets/TRIPLE/include/cccl`.
    """
    (include, *_) = [
        folder
        for folder in nvrtc.include_folders()
        if (folder / "cuda_runtime.h").is_file() and (folder / "cccl").is_dir()
    ]
    triple = f"{platform.machine()}-linux"
    for link in (scratch / "cuda" / "include", scratch / "cuda" / "targets" / triple / "include"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(include)
    libraries = [str(Path(load_nvidia_dynamic_lib("cudart").abs_path).parent)]
    path = os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"CUDA_PATH": str(scratch / "cuda"), "LD_LIBRARY_PATH": path}


def run_stock(
    options: argparse.Namespace, tasks: Sequence[Task], spec: SliceSpec, seed: int
) -> None:
    part = options.out / f"stock-{seed}.jsonl.part"
    work = options.out / f"stock-{seed}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    command = [sys.executable, str(HERE / "stock_tuner.py"), *share_of(options)]
    command += ["--tasks", ",".join(t.task_id for t in tasks), "--seed", str(seed)]
    command += ["--trials-per-task", str(options.trials_per_task), "--batch", str(options.batch)]
    command += ["--out", str(part), "--work", str(work)]
    with share(spec, work) as (environment, end_clients), (work / "log").open("wb") as log:
        started_at = time.time()
        header = {
            "tuner": "stock",
            "seed": seed,
            "command": host.shown(command),
            "started_at": started_at,
        }
        write(part, {**header, "limit_secs": options.stock_limit}, indent=None)
        process = subprocess.Popen(
            [*command, "--started-at", repr(started_at)],
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = process.wait(options.stock_limit)
        except subprocess.TimeoutExpired:
            status = 0
            with part.open("a") as out:
                end = {"ended": "cut short", "secs": time.time() - started_at}
                out.write("\n" + json.dumps(end) + "\n")
        finally:
            end_clients()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        tail = (work / "log").read_text(errors="replace")[-1500:]
        raise InputError(f"TVM's tuner ended with {status}; {work / 'log'} ends with:\n{tail}")
    part.rename(options.out / f"stock-{seed}.jsonl")


def run_tunerd(options: argparse.Namespace, tasks: Sequence[Task], _: SliceSpec, seed: int) -> None:
    folder = options.out / f"tunerd-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, str(Path(__file__).resolve()), *share_of(options)]
    command += ["--tasks", ",".join(t.task_id for t in tasks), "--seeds", str(seed)]
    command += ["--trials-per-task", str(options.trials_per_task), "--out", str(folder), "--inside"]
    started_at = time.time()
    done = subprocess.run(command, check=False)
    ended_at = time.time()
    if done.returncode:
        raise InputError(f"tunerd ended with {done.returncode}; {folder} keeps its logs")
    header = {
        "tuner": "tunerd",
        "seed": seed,
        "command": host.shown(command),
        "started_at": started_at,
    }
    lines = [header, *lines_of(folder, started_at)]
    lines.append({"ended": "complete", "secs": ended_at - started_at})
    part = options.out / f"tunerd-{seed}.jsonl.part"
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(options.out / f"tunerd-{seed}.jsonl")


def search_inside(options: argparse.Namespace) -> None:
    """Be tunerd, in a process of its own."""
    selection = Selection(tuple(options.tasks.split(",")), options.trials_per_task)
    (seed,) = seeds_of(options)
    search(settings_of(options, options.out, seed), selection)


def lines_of(folder: Path, started_at: float) -> Iterator[dict[str, Any]]:
    """Yield what tunerd got and its search's trials, as TVM's are written."""
    from tunerd.records import Store
    from tunerd.vocabulary import Failure

    with Store.read(folder) as store:
        proofs = {p.slice_id: to_json(p) for p in store.proofs()}
        _, facts = store.sessions()[-1]
        yield {"got": {"slices": list(proofs.values()), "target": facts.target.json}}
        for r in store.records():
            if r.candidate.is_default or r.ended_at is None:
                continue
            failure = r.result if isinstance(r.result, Failure) else None
            yield {
                "at_secs": r.ended_at - started_at,
                "task_id": r.candidate.task_id,
                "candidate_id": r.candidate.candidate_id,
                "run_secs": list(r.result.run_secs) if isinstance(r.result, Measurement) else None,
                "error": f"{failure.stage}: {failure.kind}" if failure else None,
                "trace": r.candidate.recipe,
            }


def share_of(options: argparse.Namespace) -> list[str]:
    if options.gpu_pct is not None:
        return [str(options.model), "--gpu-pct", str(options.gpu_pct)]
    return [str(options.model), "--cpu-pct", str(options.cpu_pct)]


def seeds_of(options: argparse.Namespace) -> list[int]:
    return [int(seed) for seed in options.seeds.split(",")]


# --- the second look ---------------------------------------------------------------------------


def remeasure(
    runs: Sequence[Run], tasks: Sequence[Task], spec: SliceSpec, model_bytes: int
) -> dict[str, Any]:
    """Measure every run's best candidate of each task and the default, in turns, in one slice.

    And the best after as many trials of each task as the other tuner had. Each is compiled as its
    tuner does.

    Args:
        model_bytes: that an inference of the whole model touches, as for the finals of tunerd.
    """
    from tunerd.builder.build import build_candidate
    from tunerd.runner.profiles import final_profile, within
    from tunerd.slices import member
    from tunerd.vocabulary import Build, default_candidate

    profile = within(final_profile("model"), model_bytes)
    found: dict[str, Any] = {"profile": to_json(profile), "tasks": {}}
    bests = summary.bests_in(runs)
    with member(spec.kind)(spec) as quiet:
        runner, found["proof"] = quiet.launch(), to_json(quiet.prove())
        for task in tasks:
            entries = {"default": default_candidate(task)}
            for name, best in bests.items():
                if record := best.get(task.task_id):
                    entries[name] = Candidate(
                        task.task_id, record["candidate_id"], METASCHEDULE, record["trace"]
                    )
            of_tvm = replace(task, target=stock.target_of_tvm(task.target))
            made = {
                name: build_candidate(of_tvm if name.startswith("stock") else task, candidate)
                for name, candidate in entries.items()
            }
            builds = {name: b for name, b in made.items() if isinstance(b, Build)}
            results = dict(zip(builds, runner.compare(list(builds.values()), profile), strict=True))
            mine = found["tasks"][task.task_id] = {}
            for name in entries:
                result = to_json(results.get(name, made[name]))
                if name != "default" and name in builds and "default" in builds:
                    result["wrong"] = to_json(runner.agree(builds["default"], builds[name]))
                mine[name] = result
            print(f"remeasured {task.name}", file=sys.stderr, flush=True)
    return found


# --- the command -------------------------------------------------------------------------------


def hide_torch(folder: Path) -> None:
    """Have both tuners, and what they start, find no PyTorch.

    TVM imports it where it is installed: its own tuner in each of the workers that it starts for a
    batch.
    """
    keep_torch_from_tvm()  # this process has its path already
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "torch.py").write_text('raise ImportError("both tuners do without PyTorch")\n')
    path = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def compare(options: argparse.Namespace) -> None:
    hide_torch(options.out / "without-torch")
    layout = local_layout(settings_of(options, options.out))
    target = layout.target.kind
    model = plan.read(settings_of(options, options.out))
    kernels = kernels_of(model, layout.target)
    tasks = chosen(options.tasks, lists_of(options.model.stem, target), kernels.tasks)
    spec = layout.slices[0][0]
    options.out.mkdir(parents=True, exist_ok=True)
    write_comparison(options.out / "comparison.json", comparison_of(options, tasks, layout))
    for seed in seeds_of(options):
        for tuner, run in (("stock", run_stock), ("tunerd", run_tunerd)):
            done = (options.out / f"{tuner}-{seed}.jsonl").exists()
            if options.only in (None, tuner) and not done:
                print(f"running {tuner}, seed {seed}", file=sys.stderr, flush=True)
                run(options, tasks, spec, seed)
    if options.only in (None, "remeasure"):
        remeasure_new(options.out, tasks, spec, kernels.touched_bytes)
    if options.only in (None, "report"):
        print(summary.report(options.out))


def remeasure_new(folder: Path, tasks: Sequence[Task], spec: SliceSpec, model_bytes: int) -> None:
    """Measure again, all together, unless that was done for every run that is finished."""
    runs = summary.runs_in(folder)
    path = folder / "remeasured.json"
    names = list(summary.bests_in(runs))
    known = json.loads(path.read_text())["names"] if path.exists() else []
    if set(names) - set(known):
        found = {"names": names, **remeasure(runs, tasks, spec, model_bytes)}
        write(path, found)


def write_comparison(path: Path, facts: dict[str, Any]) -> None:
    """Write what is compared; InputError where the folder holds the runs of something else."""
    if path.exists():
        before = json.loads(path.read_text())
        for key in ("model", "share", "target", "batch", "trials_per_task", "tasks", "torch"):
            if before.get(key) != facts.get(key):
                raise InputError(
                    f"{path.parent} compares with another {key.replace('_', ' ')}; choose another "
                    "folder with --out"
                )
    write(path, facts)


def comparison_of(
    options: argparse.Namespace, tasks: Sequence[Task], layout: Layout
) -> dict[str, Any]:
    """Return what is compared, and where. `workers` are tunerd's; a run says what TVM's got."""
    target = layout.target.kind
    what = {e["task_id"]: e["what"] for e in lists_of(options.model.stem, target)}
    return {
        "command": host.shown(sys.argv),
        "model": options.model.stem,
        "share": share_of(options)[1:],
        "target": target,
        "batch": options.batch,
        "trials_per_task": options.trials_per_task,
        "stock_limit_secs": options.stock_limit,
        "torch": "hidden",
        "tasks": [
            {
                "task_id": t.task_id,
                "name": t.name,
                "what": what.get(t.task_id),
                "weight": t.weight,
                "flops": t.flops,
                "args": to_json(t.args),
            }
            for t in tasks
        ],
        "workers": {
            "slices": [to_json(spec) for spec, _ in layout.slices],
            "tuners": to_json(layout.tuners),
        },
        "host": to_json(host.facts()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    shares = parser.add_mutually_exclusive_group(required=True)
    shares.add_argument("--cpu-pct", type=int)
    shares.add_argument("--gpu-pct", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", help="how many of the list, or ids with commas between them")
    parser.add_argument("--trials-per-task", type=int, default=128)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--batch", type=int, default=64, help="of TVM's tuner")
    parser.add_argument("--stock-limit", type=parse_duration, default=720.0, help="such as 12m")
    parser.add_argument("--only", choices=(*TUNERS, "remeasure", "report"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model, options.out = options.model.resolve(), options.out.resolve()
    try:
        (search_inside if options.inside else compare)(options)
    except TunerdError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
