"""The devices of all machines under one name each, and what runs on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunerd.colocation.placement.host import Ended, Found, Host, Seen
from tunerd.errors import HostError

# A method of the `Host` of one machine, by name: called here, or through Ray.
Call = Callable[..., Any]


class Fleet:
    """Machines by any key. close() ends what runs, and is idempotent.

    Raises HostError where no machine has a device.
    """

    def __init__(self, machines: Mapping[str, Call]) -> None:
        self._calls = dict(machines)
        self._at: dict[str, tuple[str, Found]] = {}  # by device: its machine, and how that calls it
        seen: dict[str, int] = {}
        told = {key: call("devices") for key, call in machines.items()}
        several = sum(bool(found) for _, found in told.values()) > 1
        for key, (hostname, found) in told.items():
            seen[hostname] = number = seen.get(hostname, 0) + 1
            if number > 1 and any(one.cores for one in found):
                continue  # a second node of one machine has the same cores
            where = hostname if number == 1 else f"{hostname}-{number}"
            for one in found:
                name = f"{where}/{one.device.name}" if several else one.device.name
                self._at[name] = (key, one)
        if not self._at:
            raise HostError(
                "there is no GPU to place jobs on; say `devices: {cores: 2}` for parts of the "
                "cores, or give the --address of a Ray cluster that has GPUs"
            )

    @property
    def devices(self) -> dict[str, Found]:
        """The devices by the names that they have here."""
        return {name: found for name, (_, found) in self._at.items()}

    def start(self, job: str, words: Sequence[str], device: str, folder: Path, log: Path) -> None:
        key, found = self._at[device]
        self._calls[key]("start", job, tuple(words), found.device.name, folder, log)

    def ended(self) -> list[Ended]:
        return [each for call in self._calls.values() for each in call("ended")]

    def seen(self) -> dict[str, Seen]:
        return {job: one for call in self._calls.values() for job, one in call("seen").items()}

    def close(self) -> None:
        calls, self._calls = self._calls, {}
        with contextlib.ExitStack() as stack:  # all of them, whatever one raises
            for call in calls.values():
                stack.callback(call, "close")


def here(host: Host) -> dict[str, Call]:
    """Return this machine as the only one."""
    return {"here": lambda method, *args: getattr(host, method)(*args)}
