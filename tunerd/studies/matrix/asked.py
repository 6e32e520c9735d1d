"""What is asked of a matrix: its shares, its rounds, and what its levels are tuned with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunerd.settings import TuneSettings
from tunerd.settings.option import checked
from tunerd.settings.studies import MatrixSettings
from tunerd.settings.texts import sized_name
from tunerd.slices import member
from tunerd.studies.matrix.claims import DEFAULT
from tunerd.vocabulary import Arrays

_TRIALS = 1000  # of the first level, where neither trials nor time are limited
_OF_A_LEVEL = (
    "model", "budget_secs", "shapes", "dims", "batch", "precision", "inputs", "values", "seed",
    "tuners", "l2",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A matrix. `base` has everything of a level but its share and folder."""

    base: TuneSettings  # its `out` is the matrix's folder, its share any
    shares: tuple[int, ...]
    rounds: int
    independent: bool = False  # each level as if it were the only one

    @property
    def unit(self) -> str:
        return self.base.share.unit

    def name(self, pct: int) -> str:
        return "default" if pct == DEFAULT else f"{self.unit}{pct}"

    def identity(self, digest: str, samples: Sequence[Arrays] = ()) -> dict[str, Any]:
        """Return what is the same for all calls in one folder; rounds may be added.

        `samples` are the inputs that were given.
        """
        kept = {"shapes", "dims", "batch", "trials", "budget_secs", "seed", "slice_kind", "l2"}
        kept |= {"precision"} if self.base.precision else set()  # folders of before have none
        return {
            "model": {"name": self.base.model.stem, "digest": digest},
            "shares": list(self.shares),
            "unit": self.unit,
            "settings": self.base.model_dump(mode="json", include=kept),
            **({"independent": True} if self.independent else {}),
            **({"samples": _digest(samples)} if samples else {}),
        }


def _digest(samples: Sequence[Arrays]) -> str:
    """Return the sha256 of inputs, in hex."""
    digest = hashlib.sha256()
    for sample in samples:
        for name, values in sorted(sample.items()):
            digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
            digest.update(values.tobytes())
    return digest.hexdigest()


def asked_of(settings: MatrixSettings) -> Asked:
    """Return what settings ask for, with what they leave open; InputError where that is unfit."""
    kind = settings.slice_kind or ("mps" if member("mps").usability().ok else "cpu")
    name = sized_name(
        settings.model.stem, batch=settings.batch, shapes=settings.shapes, dims=settings.dims
    )
    name += f"-{settings.precision}" if settings.precision else ""
    is_limited = settings.trials is not None or settings.budget_secs is not None
    base = checked(
        TuneSettings,
        {field: getattr(settings, field) for field in _OF_A_LEVEL}
        | {
            "cpu_pct" if kind == "cpu" else "gpu_pct": max(settings.shares),
            "slice_kind": kind,
            "out": settings.out or Path("runs") / f"{name}-matrix",
            "trials": settings.trials if is_limited else _TRIALS,
        },
    )
    return Asked(base, settings.shares, settings.rounds, settings.independent)
