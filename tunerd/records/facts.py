"""What a run is about, and whether another run may go on in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from tunerd.errors import FolderError
from tunerd.frontend.model import FixedModel
from tunerd.records import typed
from tunerd.settings import TuneSettings
from tunerd.system.version import __version__
from tunerd.vocabulary import AS_EXPORTED, Model, TargetSpec, architecture, to_json


@dataclass(frozen=True)
class RunFacts:
    """One session of a run. Sessions of a run agree in all fields up to `tvm_version`."""

    model_name: str
    model_digest: str
    target: TargetSpec
    device: str  # GPU or CPU model, as CapProof.device says it
    slice_kind: str
    pct: int
    tvm_version: str
    tunerd_version: str = __version__
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    host: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def precision(self) -> str:
        """That kernels compute in; "": as exported."""
        return str(self.settings.get("precision") or "")

    @property
    def precision_text(self) -> str:
        return self.precision or AS_EXPORTED

    @property
    def tenants(self) -> int | None:
        """How many models one launch of the run's artifact serves; None: it is of one alone."""
        return next(iter(self.settings.get("tenants") or ()), None)

    @classmethod
    def of(
        cls,
        settings: TuneSettings,
        model: Model | FixedModel,
        *,
        target: TargetSpec,
        device: str,
        host: Any,
    ) -> RunFacts:
        """Gather the facts of a session; `host` is what to_json accepts."""
        return cls(
            model_name=model.name,
            model_digest=model.digest,
            target=target,
            device=device,
            slice_kind=settings.slice_kind,
            pct=settings.pct,
            tvm_version=metadata.version("apache-tvm"),
            settings=settings.model_dump(mode="json"),
            host=to_json(host),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "model": {"name": self.model_name, "digest": self.model_digest},
            "target": {"kind": self.target.kind, "json": self.target.json},
            "device": self.device,
            "slice_kind": self.slice_kind,
            "pct": self.pct,
            "tvm_version": self.tvm_version,
            "tunerd_version": self.tunerd_version,
            "settings": dict(self.settings),
            "host": dict(self.host),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunFacts:
        """Read what to_json returned; raises ValueError or LookupError for anything else."""
        model = typed.of_kind(dict[str, Any], value["model"])
        named = {"model_name": model["name"], "model_digest": model["digest"]}
        return typed.of_kind(RunFacts, {**value, **named})


def refuse_other_run(found: RunFacts, asked: RunFacts, folder: Path | str) -> None:
    """Raise FolderError unless trials of `asked` may join those that `folder` holds of `found`.

    Numbers of another model, device, share or TVM cannot be compared; a budget, a seed, the number
    of slices and where Ray runs may differ.
    """
    if found.model_digest != asked.model_digest:
        held, wanted = ((facts.model_name, _sizes(facts)) for facts in (found, asked))
        raise FolderError(
            f"{folder} holds a run of model '{held[0]}' (sha256 {found.model_digest[:12]}) "
            f"{held[1]}, not of '{wanted[0]}' (sha256 {asked.model_digest[:12]}) {wanted[1]}"
            f"{', whose file is another or has changed' if held == wanted else ''}; choose another "
            "folder with --out, or continue it with the model and flags that it was started with"
        )
    pairs = {
        "device": (found.device, asked.device),
        "target": (found.target.kind, asked.target.kind),
        "code for": (code_for(found.target), code_for(asked.target)),
        "slice kind": (found.slice_kind, asked.slice_kind),
        "share": (f"{found.pct}%", f"{asked.pct}%"),
        "precision": (found.precision_text, asked.precision_text),
        "tenants": (f"{found.tenants or 'none'}", f"{asked.tenants or 'none'}"),
        "TVM": (found.tvm_version, asked.tvm_version),
    }
    other = {what: pair for what, pair in pairs.items() if pair[0] != pair[1]}
    if other:
        holds = ", ".join(f"{what} {pair[0]}" for what, pair in other.items())
        wants = ", ".join(f"{what} {pair[1]}" for what, pair in other.items())
        raise FolderError(
            f"{folder} holds a run with {holds}, and this one has {wants}; measurements of the "
            "two cannot be compared: choose another folder with --out, or continue it as it was "
            "started"
        )


def _sizes(facts: RunFacts) -> str:
    """Return the flags that gave the model of a run its sizes and types."""
    settings = facts.settings
    said = [f"--batch {settings['batch']}"] if settings.get("batch") is not None else []
    shapes = dict(settings.get("shapes") or {})
    said += [f"--shape {name}:{','.join(map(str, shape))}" for name, shape in shapes.items()]
    said += [f"--dim {name}={size}" for name, size in dict(settings.get("dims") or {}).items()]
    if settings.get("io_precision"):
        said.append(f"--io-precision {settings['io_precision']}")
    return f"with {' '.join(said)}" if said else "as exported"


def code_for(target: TargetSpec) -> str:
    """Return the architecture that a target's code is for."""
    return architecture(target.json) or "any"
