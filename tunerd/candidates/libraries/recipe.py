"""The recipe of a library's candidate: which of its kernels compute the task.

Another version of a library has others, and so other candidates.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tunerd.libraries.cudnn_graphs import Configuration


@dataclass(frozen=True)
class Recipe:
    """An algorithm by its rank in the library's heuristic, which names it where it runs."""

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


@dataclass(frozen=True)
class PlanRecipe:
    """A plan by what identifies it."""

    configuration: Configuration
    version: str  # as a Recipe's

    @property
    def text(self) -> str:
        said = {**asdict(self.configuration), "version": self.version}
        return json.dumps(said, separators=(",", ":"), sort_keys=True)

    @staticmethod
    def parse(text: str) -> PlanRecipe:
        """Read a recipe; raises ValueError, KeyError or TypeError for what is none."""
        said = json.loads(text)
        knobs = tuple((int(kind), int(value)) for kind, value in said["knobs"])
        workspace_bytes = int(said["workspace_bytes"])
        if workspace_bytes < 0:
            raise ValueError("a workspace below 0 bytes")
        found = Configuration(int(said["engine"]), knobs, workspace_bytes)
        return PlanRecipe(found, str(said["version"]))
