"""The artifacts of a mix's entries: given, tuned before, or tuned now at each share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from tunerd.api.mix_sources import finished, whole_artifact
from tunerd.api.run import OnStep
from tunerd.colocation.planning.mix import Entry, Mix


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
        if len(tuned) < 2:
            return tuple(tuned[:1])
        return (self._packed(entry, tuned),)

    def _tuned(self, entry: Entry, pct: int) -> Path | None:
        from tunerd.api.tuning import TuneOptions, tune

        assert entry.model is not None
        unit = "gpu" if self._mix.device == "cuda" else "cpu"
        ending = f"-{entry.precision}" if entry.precision else ""
        out = self._folder / "tuned" / f"{entry.name}{ending}-{unit}{pct}"
        before = finished(out)
        if before is not None:
            return before
        if self._is_dry:
            secs = f"{self._mix.search.budget:g} s of search"
            self._to_make.append(f"tune {entry.name} at {pct}%: {secs}")
            return None
        what = f"tuning {entry.name} at {pct}%"
        self._steps.say(what)
        options: TuneOptions = {"out": out, "budget_secs": self._mix.search.budget}
        if unit == "gpu":
            options["gpu_pct"] = pct
        else:
            options["cpu_pct"] = pct
        if entry.precision:
            options["precision"] = entry.precision
        run = tune(
            entry.model,
            on_progress=lambda state: self._steps.say_of(what, state.message or state.phase),
            **options,
        )
        return run.artifact.path.absolute()

    def _packed(self, entry: Entry, tuned: Sequence[Path]) -> Path:
        """Join the artifacts of several shares: the engine loads what is nearest to its lane."""
        from tunerd.artifacts.manifest import LoadError, read_variants
        from tunerd.artifacts.packing import pack_shares

        to = (self._folder / "artifacts" / entry.name).absolute()
        wanted = [variant["files"] for path in tuned for variant in read_variants(path)]
        with contextlib.suppress(LoadError):
            there = [variant["files"] for variant in read_variants(to)]
            if sorted(map(str, there)) == sorted(map(str, wanted)):
                return to
        if self._is_dry:
            return tuned[-1]
        to.parent.mkdir(parents=True, exist_ok=True)
        pack_shares(tuned, to)
        return to
