"""Faults of one session: which strikes where, drawn from a seed, and a log of what came of each.

A fault is logged as "injected" before it strikes, and as "seen" when what tunerd says or does shows
it. One that the end of its session overtook, before anybody could see it, is logged as that.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# How likely each fault is where it may strike.
AT_A_CALL = {
    "worker lost before its work": 0.06,
    "worker lost after its work": 0.06,
    "workers lost at once": 0.015,
}
AT_A_START = {"worker lost before its work": 0.005, "worker lost after its work": 0.005}
AT_A_RESULT = {"collateral": 0.08, "runner killed": 0.08, "daemon lost": 0.04}
AT_A_STATEMENT = {"driver killed in a transaction": 0.004}
AT_A_COMMIT = {"driver killed": 0.006, "torn write": 0.01}
AT_A_TRANSACTION = {"store full": 0.006, "store locked": 0.005, "store locked briefly": 0.015}
AT_A_WAIT = {
    "SIGTERM": 0.004,
    "SIGTERM, with seconds to live": 0.006,
    "clock set forwards": 0.01,
    "clock set back": 0.01,
    "second tunerd": 0.01,
}
AT_A_FILE = {"folder full": 0.03}
OF_NODES = {"node leaves": 0.08, "node joins": 0.02}  # at a look at a cluster that was joined
DEADLY = {"driver killed in a transaction", "driver killed", "torn write", "its seconds were over"}
ENDING = DEADLY | {"SIGTERM", "SIGTERM, with seconds to live"}
ENDING |= {"store full", "store locked", "folder full"}
KINDS = {
    fault
    for faults in (AT_A_CALL, AT_A_RESULT, AT_A_STATEMENT, AT_A_COMMIT, AT_A_TRANSACTION)
    for fault in faults
} | {*AT_A_WAIT, *AT_A_FILE, *DEADLY}
# What candidates of the list do in every run, and what it does to others.
OWN = {"hangs", "faults", "faults, unnamed", "falls with a neighbour"}
OWN |= {"is out of memory", "is refused"}

# Losses of a trial, or of a task's search, in one session: the third is its own fault.
SPARED = 2
_MOMENTS_TO_LIVE = 20  # commits


class Chaos:
    """Decides over one session, which is this process."""

    def __init__(self, log: Path, seed: str, intensity: float) -> None:
        self.random = random.Random(seed)
        self._intensity = intensity
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._losses: Counter[str] = Counter()
        self._open: dict[str, tuple[str, str]] = {}  # faults not seen yet, by name
        self._left_to_live: int | None = None
        self.ends_anyway = False
        # Candidates that may not be under way at one more end of a session.
        self.protected: set[str] = set()

    def note(self, what: str, fault: str, **more: Any) -> None:
        line = json.dumps({"what": what, "fault": fault, "pid": os.getpid()} | more)
        os.write(self._log, f"{line}\n".encode())

    def draw(self, faults: Mapping[str, float]) -> str:
        """Return the fault that strikes here, or nothing."""
        if not self.ends_anyway:
            for fault, rate in faults.items():
                if self.random.random() < rate * self._intensity:
                    return "" if self.protected and fault in ENDING else fault
        return ""

    def inject(self, fault: str, *, shows_as: str = "", ends: bool = False, **more: Any) -> str:
        """Log a fault that strikes now, and return its name.

        Args:
            shows_as: a text that what tunerd says of it holds; its name if not given.
            ends: whether it is the end of its session, so that no other fault may come between.
        """
        name = f"chaos-{os.getpid()}-{self.random.getrandbits(40):010x}"
        self._open[name] = fault, shows_as or name
        self.ends_anyway |= ends
        self.note("injected", fault, name=name, **more)
        return name

    def see(self, text: str) -> None:
        """Take what tunerd says, or somebody for it: it may show a fault."""
        for name, (fault, shows_as) in list(self._open.items()):
            if shows_as in text:
                del self._open[name]
                self.note("seen", fault, name=name)

    def end(self) -> None:
        """Inject nothing more."""
        self.ends_anyway = True

    def overtake(self) -> None:
        """Give up the faults that nobody has seen: their session ends."""
        while self._open:
            name, (fault, _) = self._open.popitem()
            self.note("overtaken", fault, name=name)

    def kill(self, fault: str) -> None:
        """End this process. Whoever waits for it sees that."""
        self.overtake()
        self.note("injected", fault, name=f"chaos-{os.getpid()}-killed")
        os.kill(os.getpid(), signal.SIGKILL)

    def may_lose(self, victims: Sequence[str]) -> bool:
        """Count the loss of trials and searches; False where one of them was lost too often."""
        if any(self._losses[v] >= SPARED for v in victims):
            return False
        self._losses.update(victims)
        return True

    def give_seconds_to_live(self) -> None:
        self._left_to_live = self.random.randint(1, _MOMENTS_TO_LIVE)

    def live_on(self) -> None:
        """Pass a moment of a life that may be counted."""
        if self._left_to_live is not None:
            self._left_to_live -= 1
            if self._left_to_live <= 0:
                self.kill("its seconds were over")


class Listener(logging.Handler):
    """Takes what tunerd logs for evidence."""

    def __init__(self, chaos: Chaos) -> None:
        super().__init__()
        self._chaos = chaos

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "tunerd.runner.client":  # of a slice's process, of which nobody hears
            return
        self._chaos.note("said", record.getMessage())
        self._chaos.see(record.getMessage())
