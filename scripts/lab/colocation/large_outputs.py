#!/usr/bin/env python3
"""What a model with large outputs costs a short one beside it, on a GPU whose times are simulated.

    PYTHONPATH=.:scripts python3 -m lab.colocation.large_outputs --out FOLDER

The short one takes 0.19 ms, has 602 KB of inputs and few bytes of outputs; requests come at --rate.
The long one takes 4 ms, with 25 MB of both, and two clients keep it busy. Each has a share of its
own, and they have the engines for copies and the host in common: what the short one loses by the
long one is what these cost. So many of the long one's outputs its caller keeps (--kept). Written:
request_parts.json and request_parts.txt, as lab.colocation.request_parts writes them of a plan.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from lab.colocation.request_parts import measured, shown
from lab.colocation.simulated import make_artifact
from lab.colocation.timed_gpu import timed_place
from lab.lab import made_by, write
from tunerd.colocation import Plan
from tunerd.colocation.dispatcher import Dispatcher

# Of floats with three channels: 602 KB, and 25 MB.
SHORT_SIDE, LONG_SIDE = 224, 1448
SHORT_SECS, LONG_SECS = 0.19e-3, 4e-3
SHORT_PCT = 25


def plan_of(short: Path, long: Path, policy: str, *, rate: float, secs: float) -> Plan:
    members = [
        {"name": "short", "artifact": short, "share": SHORT_PCT, "rate": rate, "slo_ms": 5},
        {"name": "long", "artifact": long, "share": 100 - SHORT_PCT, "clients": 2},
    ]
    load = {"kind": "poisson", "duration": secs, "alone": ["short", "long"]}
    return Plan.model_validate({"policy": {"kind": policy}, "members": members, "load": load})


@contextmanager
def kept(count: int) -> Iterator[None]:
    """Have the last outputs of the long model kept by their caller in this block."""
    have = deque[Any](maxlen=count)
    usual = Dispatcher._carry_out

    def noted(dispatcher: Dispatcher, instruction: Any) -> None:
        usual(dispatcher, instruction)
        for asked, _ in dispatcher._answers[-1:]:
            if asked.request.member == "long" and count:
                have.append(asked.outputs)

    with mock.patch.object(Dispatcher, "_carry_out", noted):
        yield


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", help="space and ordered if not given")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second")
    parser.add_argument("--secs", type=float, default=2.0, help="of each load")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--kept", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    document = made_by() | {"found": {}}
    with tempfile.TemporaryDirectory() as scratch, kept(options.kept):
        short = make_artifact(Path(scratch) / "short", SHORT_SIDE, layer="GlobalAveragePool")
        long = make_artifact(Path(scratch) / "long", LONG_SIDE)
        secs = {short: (SHORT_SECS, SHORT_PCT), long: (LONG_SECS, 100 - SHORT_PCT)}
        for policy in options.policy or ["space", "ordered"]:
            plan = plan_of(short, long, policy, rate=options.rate, secs=options.secs)
            document["found"][policy] = measured(
                plan, secs=options.secs, turns=options.turns, place=lambda: timed_place(secs)
            )
            write(options.out / "request_parts.json", document, indent=None)
    (options.out / "request_parts.txt").write_text(shown(document["found"]) + "\n")
    print(shown(document["found"]))


if __name__ == "__main__":
    main()
