"""`tunerd bench`: an artifact's speed at a share, alone and beside neighbours."""

from __future__ import annotations

import json as json_module
from pathlib import Path

from tunerd.cli.options import AsJson, Debug
from tunerd.errors import FolderError
from tunerd.settings.studies import BenchSettings
from tunerd.system.text import reason_of


def bench(settings: BenchSettings, json: AsJson = False, debug: Debug = False) -> int:
    """Measure an artifact's latency and throughput in its slice, alone and beside neighbours."""
    from rich.console import Console

    from tunerd import api
    from tunerd.report.bench_table import bench_json, bench_table, rounds_json

    with Console(stderr=True, quiet=json).status("starting") as status:
        result = api.bench(
            settings.artifact,
            gpu_pct=settings.gpu_pct,
            cpu_pct=settings.cpu_pct,
            beside=settings.beside,
            replicas=settings.replicas,
            duration_secs=settings.duration_secs,
            on_step=status.update,
        )
    document, raw = bench_json(result), {"rounds": rounds_json(result)}
    if (to := settings.to) is not None:
        _write(to, json_module.dumps(document | raw) + "\n")
    if json:
        print(json_module.dumps(document | ({"raw": str(to)} if to else raw)))
        return 0
    Console(highlight=False).print(bench_table(result))
    return 0


def _write(to: Path, text: str) -> None:
    try:
        to.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise FolderError(f"--to {to} cannot be written: {reason}; name another file") from None
