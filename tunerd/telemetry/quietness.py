"""When the devices of a run become disturbed, and when they are quiet again: said once each."""

from __future__ import annotations

from collections.abc import Iterable

from tunerd.vocabulary import Failure, Measurement

QUIET_RESULTS = 8  # in a row, after which a device counts as quiet: what comes and goes is one


class Quietness:
    """Turns the results of devices into the sentences that are news."""

    def __init__(self) -> None:
        self._quiet: dict[str, int] = {}  # results in a row, of devices that were disturbed

    def note(self, device: str, results: Iterable[Measurement | Failure]) -> list[str]:
        """Return what is to be said of a device after these results of it, mostly nothing."""
        said = []
        for result in results:
            if isinstance(result, Failure):
                continue
            cause = result.conditions.disturbed_by
            if cause:
                if device not in self._quiet:
                    said.append(
                        f"{device}: {cause}; what is measured now is marked, and its best are "
                        "measured again when the device is quiet"
                    )
                self._quiet[device] = 0
            elif device in self._quiet:
                self._quiet[device] += 1
                if self._quiet[device] >= QUIET_RESULTS:
                    del self._quiet[device]
                    said.append(f"{device} is quiet again")
        return said
