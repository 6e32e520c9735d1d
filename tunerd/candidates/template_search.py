"""Task -> Candidates of its template: first by an estimate, then by a cost model.

The space of a template is up to some thousand ways to cut it, and all of them are scored. The first
candidates are the best by the estimate, which knows the SMs of the share, no two of them alike;
then a cost model chooses, which learns from every result of the run and has the estimate among its
features. Some are always taken by the estimate alone, since the model knows what was tried. Where
other runs have measured the very task, at another share or for another number of models, half of
the first candidates are the best of those.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from tunerd.candidates.base import Search, SearchSettings
from tunerd.candidates.cost_model import CostModel
from tunerd.candidates.transferred import in_turn, most_first
from tunerd.vocabulary import (
    Candidate,
    Proposal,
    Result,
    Task,
    TrainingRow,
    TransferredResults,
    candidate_id,
)

log = logging.getLogger(__name__)

_FIRST = 12  # candidates by the estimate alone, of each kind by turns
_ALIKE = 2  # of a batch with the same tile, differing in stages or warps
_SIZES = ("rows", "columns", "depth", "splits", "groups", "fills_steps", "is_ahead")  # of a tile
_KIND = "is_ahead"  # what an estimate may have wrong for all cuts of a template alike
_BY_ESTIMATE = 0.15  # of later candidates
_SMS = 132  # where a share's are not known


class Cuttable(Protocol):
    """A task as a template that can be cut in several ways."""

    def tiles(self) -> Iterator[Any]: ...
    def estimated_secs(self, tile: Any, sms: float) -> float: ...
    def features(self, tile: Any, sms: float) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class TemplateRecipe:
    """A template's name, and how it is cut."""

    VERSION: ClassVar[int]  # of the templates' text: another one gives other candidates
    CUTS: ClassVar[Mapping[str, type]]  # of integers alone, by the template

    template: str
    cut: Any

    @property
    def text(self) -> str:
        content = {"template": self.template, "version": self.VERSION, **asdict(self.cut)}
        return json.dumps(content, separators=(",", ":"), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a recipe; raises ValueError, KeyError or TypeError for what is none."""
        content = json.loads(text)
        if content["version"] != cls.VERSION:
            raise ValueError(f"the templates are of version {cls.VERSION}: tune the task again")
        kind = cls.CUTS[content["template"]]
        cut = kind(**{f.name: int(content[f.name]) for f in fields(kind)})
        return cls(content["template"], cut)


@dataclass(frozen=True)
class TemplateFamily:
    """What a source has templates for."""

    source: str
    recipe: type[TemplateRecipe]
    templates_of: Callable[[Task], Mapping[str, Cuttable] | str]  # or why there is none


@dataclass
class _Space:
    """The ways to cut one task."""

    task: Task
    tiles: list[tuple[str, Any]]  # template and how it is cut, by rising estimate
    features: npt.NDArray[np.float32]  # shape [tile, feature]
    ids: list[str]
    recipes: list[str]
    index: dict[str, int] = field(default_factory=dict)  # of a candidate's id
    first: list[int] = field(default_factory=list)  # the best of other runs
    known: set[int] = field(default_factory=set)  # proposed or told


class TemplateSearch(Search):
    """The search of one tuner. Not thread-safe."""

    def __init__(self, family: TemplateFamily, settings: SearchSettings) -> None:
        self._family = family
        self._sms = settings.sms or _SMS
        self._templates: dict[str, Mapping[str, Cuttable]] = {}  # by task
        self._spaces: dict[str, _Space] = {}
        self._best: dict[str, list[list[str]]] = {}  # by task and run: recipes, best first
        self._random = np.random.default_rng((settings.seed, settings.island_number))
        self._cost_model = CostModel(seed=settings.seed, threads=settings.threads)

    def learn(self, transferred: Sequence[TransferredResults], tasks: Mapping[str, Task]) -> None:
        for past in transferred:
            task, best = tasks.get(past.task.task_id, past.task), list[str]()
            self._best.setdefault(task.task_id, []).append(best)
            try:
                templates = self._templates_of(task)  # whose ways to cut it are not needed yet
                for recipe, run_secs in past.results:
                    parsed = self._family.recipe.parse(recipe)
                    template = templates[parsed.template]
                    sms = (past.sms or self._sms) / past.task.tenants
                    own = _features(template, parsed.cut, sms)
                    self._cost_model.tell(past.key, f"{past.key}/{recipe}", own, run_secs)
                    if run_secs is not None:
                        best.append(recipe)
            except Exception as error:  # of a store that something else wrote
                log.warning("%s teaches nothing: %s", past.key, error)

    def propose(
        self,
        task: Task,
        count: int,
        *,
        results: Sequence[Result] = (),
        exclude: Collection[str] = (),
        rows: Sequence[TrainingRow] = (),
    ) -> Proposal:
        started = time.perf_counter()
        try:
            for row in rows:
                own = np.frombuffer(row.features, dtype=np.float32)
                self._cost_model.tell(row.task_id, row.candidate_id, own, row.run_secs)
            space = self._space(task)
            self._tell(space, results)
            chosen = self._choose(space, count, exclude)
        except Exception as error:  # of a task that no template fits
            message = f"{type(error).__name__}: {error}"[:500]
            log.warning("%s: no candidates of %s: %s", task.name, self._family.source, message)
            return Proposal((), True, message, time.perf_counter() - started)
        space.known.update(chosen)
        source = self._family.source
        candidates = tuple(
            Candidate(task.task_id, space.ids[i], source, space.recipes[i]) for i in chosen
        )
        message = "" if candidates else "every way to cut the template was tried"
        features = tuple(space.features[i].tobytes() for i in chosen)
        secs = time.perf_counter() - started
        return Proposal(candidates, not candidates, message, secs, features)

    def _templates_of(self, task: Task) -> Mapping[str, Cuttable]:
        if task.task_id not in self._templates:
            found = self._family.templates_of(task)
            if isinstance(found, str):
                raise ValueError(found)
            self._templates[task.task_id] = found
        return self._templates[task.task_id]

    def _space(self, task: Task) -> _Space:
        if task.task_id not in self._spaces:
            found = self._templates_of(task)
            sms = self._sms / task.tenants  # lanes fill a device as if each had its part of it
            estimated = sorted(
                (template.estimated_secs(cut, sms), name, cut)
                for name, template in found.items()
                for cut in template.tiles()
            )
            tiles = [(name, cut) for _, name, cut in estimated]
            recipes = [self._family.recipe(name, cut).text for name, cut in tiles]
            ids = [candidate_id(task.task_id, r, source=self._family.source) for r in recipes]
            rows = [_features(found[name], cut, sms) for name, cut in tiles]
            features = np.array(rows, np.float32)
            space = _Space(task, tiles, features, ids, recipes)
            space.index = {name: i for i, name in enumerate(ids)}
            space.first = self._first(space)
            self._spaces[task.task_id] = space
        return self._spaces[task.task_id]

    def _first(self, space: _Space) -> list[int]:
        """Return the best of each other run in turn, few of them with one tile."""
        of_runs = self._best.get(space.task.task_id, [])
        place_of = {recipe: place for place, recipe in enumerate(space.recipes)}
        places = [place_of[recipe] for recipe in in_turn(of_runs) if recipe in place_of]
        return self._unlike(space, places, most_first(len(of_runs)))

    def _tell(self, space: _Space, results: Sequence[Result]) -> None:
        for result in results:
            name = result.candidate.candidate_id
            place = space.index.get(name)
            if place is None:
                continue
            space.known.add(place)
            own = space.features[place]
            self._cost_model.tell(space.task.task_id, name, own, result.run_secs)

    def _choose(self, space: _Space, count: int, exclude: Collection[str]) -> list[int]:
        taken = space.known | {space.index[x] for x in exclude if x in space.index}
        left = [i for i in range(len(space.tiles)) if i not in taken]
        by_estimate = iter(left)
        if len(taken) < _FIRST or not self._cost_model.told(space.task.task_id):
            first = [place for place in space.first if place not in taken][:count]
            others = [place for place in left if place not in space.first]
            return first + self._unlike(space, _by_turns(space, others), count - len(first))
        scores = self._cost_model.predict(space.features[left])
        by_score = [left[i] for i in np.argsort(-scores, kind="stable")]
        chosen = self._unlike(space, by_score, count)
        for place in range(len(chosen)):
            if self._random.random() < _BY_ESTIMATE:
                other = next((i for i in by_estimate if i not in chosen), None)
                if other is not None:
                    chosen[place] = other
        return chosen

    def _unlike(self, space: _Space, ordered: Sequence[int], count: int) -> list[int]:
        """Return the first, few of them with one tile."""
        seen: dict[Any, int] = {}
        chosen: list[int] = []
        rest: list[int] = []
        for place in ordered:
            if len(chosen) == count:
                break
            key = _tile_of(space.tiles[place])
            if seen.get(key, 0) < _ALIKE:
                seen[key] = seen.get(key, 0) + 1
                chosen.append(place)
            elif len(rest) < count:
                rest.append(place)
        return [*chosen, *rest][:count]


def _by_turns(space: _Space, places: Sequence[int]) -> list[int]:
    """Return places so that each kind has its turn; those of a kind in the order that they have."""
    kinds: dict[int, list[int]] = {}
    for place in places:
        kinds.setdefault(getattr(space.tiles[place][1], _KIND, 0), []).append(place)
    return in_turn(kinds.values())


def _tile_of(tile: tuple[str, Any]) -> tuple[Any, ...]:
    name, cut = tile
    return (name, *(getattr(cut, size, 0) for size in _SIZES))


def _features(template: Cuttable, cut: Any, sms: float) -> npt.NDArray[np.float32]:
    """Return what the cost model knows of a cut; all templates have as many features."""
    return np.asarray(template.features(cut, sms), dtype=np.float32)
