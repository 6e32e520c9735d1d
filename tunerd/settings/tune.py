"""The settings of one `tunerd tune`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from tunerd.system.store_address import StoreAddress

MAX_SECS = 366 * 24 * 3600.0
MAX_COUNT = 2**31 - 1  # of trials, and the largest seed and dimension: what 32 bits hold
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h)?")
_UNIT_SECS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return the seconds that `90`, `90s`, `500ms`, `10m` or `1.5h` is; ValueError otherwise."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise ValueError(f"'{text}' is not a duration; write for example 90s, 10m or 1.5h")
    secs = float(match[1]) * _UNIT_SECS[match[2]]
    if secs > MAX_SECS:
        raise ValueError(f"'{text}' is longer than a year; write for example 90s, 10m or 1.5h")
    return secs


class TuneSettings(BaseModel):
    """One `tunerd tune`. Exactly one of gpu_pct and cpu_pct is set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)

    model: Path
    out: Path
    gpu_pct: int | None = Field(None, ge=1, le=100)
    cpu_pct: int | None = Field(None, ge=1, le=100)
    share_from: Literal["flag", "auto"] = "flag"  # auto: until it is chosen the share is 100
    slo_ms: float | None = Field(None, gt=0, le=MAX_SECS)  # what an automatic share is to meet
    slices: int | None = Field(None, ge=1)  # per device; None: as many as fit
    slice_kind: Literal["mps", "cpu", "whole", "simulated"]
    shapes: dict[str, tuple[int, ...]] = Field(default_factory=dict)  # by input name
    dims: dict[str, int] = Field(default_factory=dict)  # by dimension name
    batch: int | None = Field(None, ge=1, le=MAX_COUNT)
    trials: int | None = Field(None, ge=1, le=MAX_COUNT)
    budget_secs: float | None = Field(None, gt=0, le=MAX_SECS)
    seed: int = Field(0, ge=0, le=MAX_COUNT)
    mps: Literal["own", "external"] = "own"
    address: str | None = None  # of a Ray cluster; None: a local one
    tuners: int | None = Field(None, ge=1)  # search and build processes; None: by the cores
    warm_start: tuple[Path, ...] = ()  # folders of other runs that the search learns from
    store: str | None = None  # of a team; the password that it came with is below
    store_password: SecretStr | None = Field(None, exclude=True, repr=False)  # written nowhere
    require_hit: bool = False  # of every task in the store: no search

    @model_validator(mode="before")
    @classmethod
    def _password_apart(cls, values: Any) -> Any:
        given = values.get("store") if isinstance(values, dict) else None
        if not isinstance(given, str):
            return values
        try:
            address = StoreAddress.parse(given, values.get("store_password"))
        except ValueError as error:
            raise ValueError(f"--store cannot be used: {error}") from None
        return {**values, "store": address.shown, "store_password": address.password}

    neighbours: Literal["none", "busy", "as-tuned"] = "none"  # of the finals
    l2: Literal["model", "cold", "warm"] = "model"  # of the finals
    fidelity: int = Field(0, ge=0, le=1000)  # candidates of each task that judge the search

    @field_validator("model", "out")
    @classmethod
    def _is_text(cls, path: Path) -> Path:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError("the path is no text in UTF-8; rename the file or folder") from None
        return path

    @model_validator(mode="after")
    def _one_share(self) -> Self:
        if (self.gpu_pct is None) == (self.cpu_pct is None):
            raise ValueError("give one share: --gpu-pct for GPUs or --cpu-pct for CPU cores")
        share_of = {"mps": "gpu", "whole": "gpu", "cpu": "cpu"}.get(self.slice_kind)
        if share_of is not None and getattr(self, f"{share_of}_pct") is None:
            raise ValueError(f"--slice {self.slice_kind} takes its share from --{share_of}-pct")
        if self.share_from == "auto":
            self._require_choice()
        elif self.slo_ms is not None:
            raise ValueError(
                "--slo-ms chooses the share; give --gpu-pct auto or --cpu-pct auto with it, or "
                "leave it out"
            )
        if self.mps == "external" and self.slice_kind != "mps":
            raise ValueError(
                f"--mps external is for slices of kind mps, and these are {self.slice_kind}; leave "
                "one of the two out"
            )
        if self.require_hit and self.store is None:
            raise ValueError("--require-hit builds from a store's records; name it with --store")
        return self

    def _require_choice(self) -> None:
        if self.slice_kind == "whole":
            raise ValueError("--slice whole has one share, so there is none to choose; give 100")
        if self.address is not None:
            raise ValueError(
                "an automatic share is measured on this machine, and --address tunes on a cluster; "
                "run `tunerd profile` on a machine like its nodes, and give a number"
            )

    @property
    def slo_secs(self) -> float | None:
        return None if self.slo_ms is None else self.slo_ms / 1e3

    @property
    def store_address(self) -> StoreAddress | None:
        return None if self.store is None else StoreAddress(self.store, self.store_password)

    @property
    def pct(self) -> int:
        return self.gpu_pct if self.gpu_pct is not None else self.cpu_pct  # type: ignore[return-value]
