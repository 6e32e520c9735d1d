"""A process that asks cuDNN's heuristics: it sees no GPU, so that it can be a client of none.

    python -m tunerd.libraries.naming

It reads lines, each a call and a device as `cudnn.configurations` takes them, and answers with
lines; it ends with its input. A tuner asks one such process. What ends that, as a part of cuDNN
that is not found, does not end the tuner.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Any

from tunerd.libraries import cudnn
from tunerd.libraries.cudnn_graphs import Configuration, ConvolutionCall
from tunerd.libraries.packages import LibraryCallError, MissingLibraryError
from tunerd.system import spawn

_ANSWER_SECS = 120.0  # the first takes 0.4 s, the others hundredths (H100 described, on two cores)
_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def named(call: ConvolutionCall, device: str) -> list[Configuration]:
    """Return what `cudnn.configurations` does; raises LibraryCallError for whatever goes wrong."""
    global _process
    with _lock:
        if _process is None:
            _process = spawn.start(
                __name__,
                changes={"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        said = _asked(_process, {"call": call.text, "device": device})
        if said is None:
            _process.kill()
            status = _process.wait()
            _process = None
            raise LibraryCallError(
                f"the process that asks cuDNN for its plans ended (exit status {status})"
            )
    if "error" in said:
        raise LibraryCallError(said["error"])
    return [
        Configuration(c["engine"], tuple((k, v) for k, v in c["knobs"]), c["workspace_bytes"])
        for c in said["found"]
    ]


def _asked(process: subprocess.Popen[bytes], what: dict[str, str]) -> dict[str, Any] | None:
    """Return the answer of a process, None where it has ended or does not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(what).encode() + b"\n")
    except OSError:
        return None
    if not select.select((process.stdout,), (), (), _ANSWER_SECS)[0]:
        return None
    line = process.stdout.readline()
    answer: dict[str, Any] | None = json.loads(line) if line else None
    return answer


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, too
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            found = cudnn.configurations(ConvolutionCall.parse(asked["call"]), asked["device"])
            answer = {"found": [asdict(each) for each in found]}
        except (LibraryCallError, MissingLibraryError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
