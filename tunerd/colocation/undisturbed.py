"""What is one for the process, and would hold requests up while an engine is open."""

from __future__ import annotations

import gc
import sys
import threading

# A caller's thread that computes has the interpreter for no longer: usually 5 ms, and the device
# would wait. Shorter turns cost more than they give: of 0.1 ms, 5% of the requests that simulated
# graphs of 0.1 ms serve on two cores.
_TURN_SECS = 5e-4

_collect = gc.collect
_changing = threading.Lock()
_open = 0  # engines
_usual_turn_secs = 0.0


def begin() -> None:
    """Be undisturbed from now on; to be called when everything is loaded.

    The collector of cyclic garbage looks at all objects of a process now and then: some 200,000,
    most of them of imported modules, in which nothing runs for 0.25 to 0.7 s. What is there now is
    exempt, so that it looks at what comes later.
    """
    global _open, _usual_turn_secs
    with _changing:
        if not _open:
            _usual_turn_secs = sys.getswitchinterval()
            sys.setswitchinterval(min(_TURN_SECS, _usual_turn_secs))
        _open += 1
        _collect()
        gc.freeze()


def end() -> None:
    """Have all as it was, when the last engine that began has ended."""
    global _open
    with _changing:
        _open -= 1
        if not _open:
            gc.unfreeze()
            sys.setswitchinterval(_usual_turn_secs)
