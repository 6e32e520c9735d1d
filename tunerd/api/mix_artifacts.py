"""The artifacts of a mix's entries: given, tuned before, or tuned now at each share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tunerd.api.mix_sources import finished, whole_artifact
from tunerd.api.run import OnStep
from tunerd.artifacts.manifest import (
    LIBRARY,
    MANIFEST,
    LoadError,
    read_all_variants,
    read_tenant,
)
from tunerd.colocation.planning.lacking import Lacking
from tunerd.colocation.planning.mix import Entry, Mix, names_of
from tunerd.records.paths import Paths


class Steps:
    """Says what comes next, where that is another thing than before."""

    def __init__(self, say: OnStep) -> None:
        self._say, self._last = say, ""

    def say_of(self, of: str, what: str) -> None:
        if (message := f"{of}: {what}") != self._last:
            self._last = message
            self._say(message)

    def say(self, what: str) -> None:
        self._last = what
        self._say(what)


class MixArtifacts:
    """Makes artifacts where they are not there yet; a dry run says what it would make.

    lacking: gets a line for each.
    """

    def __init__(
        self,
        mix: Mix,
        folder: Path,
        shares: Sequence[int],
        steps: Steps,
        lacking: Lacking,
        *,
        is_dry: bool,
    ) -> None:
        self._mix, self._folder, self._shares = mix, folder, shares
        self._steps, self._lacking, self._is_dry = steps, lacking, is_dry

    def of(self, entry: Entry) -> tuple[Path, ...]:
        """Return the artifact of each member of an entry; none where a dry run would tune it."""
        if entry.artifacts:
            return tuple(map(whole_artifact, entry.artifacts))
        if entry.artifact is not None:
            return (whole_artifact(entry.artifact),)
        tuned = [path for pct in self._shares if (path := self._tuned(entry, pct)) is not None]
        if not tuned:
            return ()
        kernels = self._packed(entry, tuned) if len(tuned) > 1 else tuned[0]
        if not entry.models or (self._is_dry and len(tuned) < len(self._shares)):
            return (kernels,)  # which has no tenants, or which they are not like yet
        return (kernels, *self._tenants(entry, kernels))

    def _tuned(self, entry: Entry, pct: int) -> Path | None:
        """Return the artifact of a share: of an entry of several models that of the first, with
        kernels for as many at once as may be chosen."""
        from tunerd.api.sizes import tune_sizes
        from tunerd.api.tuning import TuneOptions, tune

        if (before := self._tuned_before(entry, pct)) is not None:
            return before
        model, counts = entry.model, self.counts(entry)
        what = f"{entry.name} at {pct}%"
        if counts:
            what += f", for {', '.join(map(str, counts))} models in a launch"
        if self._is_dry:
            each = " each" if len(counts) > 1 else ""
            budget = self._mix.search.budget
            secs = max(1, len(counts)) * (budget + _fixed_secs(self._unit))
            self._lacking.add(f"tune {what}: {budget:g} s of search{each}", secs)
            return None
        self._steps.say(f"tuning {what}")
        options: TuneOptions = {
            "out": self._out(entry, pct),
            "budget_secs": self._mix.search.budget,
        }
        if self._unit == "gpu":
            options["gpu_pct"] = pct
        else:
            options["cpu_pct"] = pct
        if entry.precision:
            options["precision"] = entry.precision
        if counts:
            options["tenants"] = counts
            model = entry.models[0]
        assert model is not None
        run = (tune_sizes if len(counts) > 1 else tune)(
            model,
            on_progress=lambda state: self._steps.say_of(
                f"tuning {what}", state.message or state.phase
            ),
            **options,
        )
        return run.artifact.path.absolute()

    def require_models(self) -> None:
        """Read each model that is to be tuned, before the first of them is.

        Raises ModelError or InputError where one cannot be used.
        """
        from tunerd.frontend.model import read_model

        for entry in self._mix.members:
            models = [entry.model] if entry.model is not None else entry.models
            if not models or all(self._tuned_before(entry, pct) for pct in self._shares):
                continue
            for model in models:
                read_model(model, precision=entry.precision or "")

    def _tuned_before(self, entry: Entry, pct: int) -> Path | None:
        out, counts = self._out(entry, pct), self.counts(entry)
        return _for_tenants(out, counts) if counts else finished(out)

    def _out(self, entry: Entry, pct: int) -> Path:
        """Return the run folder of an entry's tuning for a share."""
        ending = f"-{entry.precision}" if entry.precision else ""
        return self._folder / "tuned" / f"{entry.name}{ending}-{self._unit}{pct}"

    @property
    def _unit(self) -> str:
        return "gpu" if self._mix.device == "cuda" else "cpu"

    def counts(self, entry: Entry) -> tuple[int, ...]:
        """Return for how many models at once an entry's kernels are; nothing for one model."""
        if not entry.models:
            return ()
        fitting = (count for count in self._mix.search.together if count <= len(entry.models))
        return tuple(sorted({1, *fitting}))

    def _tenants(self, entry: Entry, kernels: Path) -> list[Path]:
        """Return the weights of an entry's further models, which run by those kernels."""
        from tunerd.frontend.model import read_model
        from tunerd.studies.tenant import libraries_of, make_tenant

        found = []
        libraries = libraries_of(read_all_variants(kernels))
        for name, model in list(zip(names_of(entry), entry.models, strict=False))[1:]:
            digest = read_model(model, precision=entry.precision or "").digest
            to = (self._folder / "artifacts" / f"{name}-{digest[:12]}").absolute()
            is_there = (to / MANIFEST).is_file() and read_tenant(to)["libraries"] == libraries
            if not is_there and self._is_dry:
                self._lacking.add(f"make {name} a tenant of {entry.name}'s kernels", 0.0)
                break
            if not is_there:
                self._steps.say(f"making {name} a tenant of {entry.name}'s kernels")
                to.parent.mkdir(parents=True, exist_ok=True)
                make_tenant(model, kernels, to)
            found.append(to)
        return found

    def _packed(self, entry: Entry, tuned: Sequence[Path]) -> Path:
        """Join the artifacts of several shares: the engine loads what is nearest to its lane."""
        from tunerd.artifacts.packing import pack_shares

        to = (self._folder / "artifacts" / entry.name).absolute()
        wanted = [key for path in tuned for key in _keys(path)]
        with contextlib.suppress(LoadError):
            if sorted(_keys(to)) == sorted(wanted):
                return to
        if self._is_dry:
            return tuned[-1]
        to.parent.mkdir(parents=True, exist_ok=True)
        pack_shares(tuned, to)
        return to


def _fixed_secs(unit: str) -> float:
    """Return what a run takes beside its search."""
    from tunerd.runs.plan import FIXED_SECS

    return FIXED_SECS["cuda" if unit == "gpu" else "llvm"]


def _keys(artifact: Path) -> list[tuple[str, str]]:
    """Return what says of each variant of which kernels and model it is, wherever it is packed."""
    variants = read_all_variants(artifact)
    return [(v["files"][LIBRARY], str(v["model"].get("digest"))) for v in variants]


def _for_tenants(out: Path, counts: Sequence[int]) -> Path | None:
    """Return a run's artifact that serves so many tenants at once; None where there is none yet."""
    artifact = Paths(out).artifact
    with contextlib.suppress(LoadError):
        if {variant.get("tenants") for variant in read_all_variants(artifact)} == set(counts):
            return artifact.absolute()
    return None
