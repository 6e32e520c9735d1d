"""Runs one program, and ends it in order when whoever placed it ends, however that is.

    python -m tunerd.colocation.placement.keeper CORES WORD...

CORES is a list as `0,1`, or empty. The program has a session of its own: SIGTERM goes to all of it
when our stdin ends, SIGKILL to what is left then. Our exit status is the program's; of one that
ended by a signal 128 and the signal's number.

We are two processes. Ray kills the children of an actor that ends: the one that waits for the
other, and not the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

STOP_SECS = 60.0  # a tuning run drains and saves
_PR_SET_PDEATHSIG = 1  # prctl(2)


def _end_with_us() -> None:
    """Have the program told to end where we are killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stop_with_stdin(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1):
        pass
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECS)
            return


def main() -> int:
    if other := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])
        return status if status >= 0 else 128 - status
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's actors have it blocked
    cores, *words = sys.argv[1:]
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    if words[0] == "tunerd":
        words[:1] = [sys.executable, "-m", "tunerd"]
    try:
        child = subprocess.Popen(  # no other thread runs yet
            words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_us
        )
    except OSError as error:
        print(f"{words[0]} does not start: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_stop_with_stdin, args=(child,), daemon=True).start()
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
