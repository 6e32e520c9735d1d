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

    to_make: gets a line for each.
    """

    def __init__(
        self,
        mix: Mix,
        folder: Path,
        shares: Sequence[int],
        steps: Steps,
        to_make: list[str],
        *,
        is_dry: bool,
    ) -> None:
        self._mix, self._folder, self._shares = mix, folder, shares
        self._steps, self._to_make, self._is_dry = steps, to_make, is_dry

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

        model, counts = entry.model, self._counts(entry)
        unit = "gpu" if self._mix.device == "cuda" else "cpu"
        ending = f"-{entry.precision}" if entry.precision else ""
        out = self._folder / "tuned" / f"{entry.name}{ending}-{unit}{pct}"
        before = _for_tenants(out, counts) if counts else finished(out)
        if before is not None:
            return before
        what = f"{entry.name} at {pct}%"
        if counts:
            what += f", for {', '.join(map(str, counts))} models in a launch"
        if self._is_dry:
            each = " each" if len(counts) > 1 else ""
            self._to_make.append(f"tune {what}: {self._mix.search.budget:g} s of search{each}")
            return None
        self._steps.say(f"tuning {what}")
        options: TuneOptions = {"out": out, "budget_secs": self._mix.search.budget}
        if unit == "gpu":
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

    def _counts(self, entry: Entry) -> tuple[int, ...]:
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
                self._to_make.append(f"make {name} a tenant of {entry.name}'s kernels")
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
