"""The recipe of a library's candidate: which of the algorithms that its heuristic names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Recipe:
    """Another version of a library has other algorithms, and so other candidates."""

    rank: int  # from 0
    sms: int  # that the heuristic counts on; 0: those of the device
    version: str  # of the library's wheel where it was proposed; "" where there was none

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"), sort_keys=True)

    @staticmethod
    def parse(text: str) -> Recipe:
        """Read a recipe; raises ValueError, KeyError or TypeError for what is none."""
        said = json.loads(text)
        found = Recipe(int(said["rank"]), int(said["sms"]), str(said["version"]))
        if found.rank < 0 or found.sms < 0:
            raise ValueError("a rank or a number of SMs below 0")
        return found
