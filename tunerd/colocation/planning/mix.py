"""The file that says which models are to share a device, with which rates and objectives.

    version: 1
    device: cpu                # or cuda; `place` as in a plan
    members:
      - name: squeezenet
        model: models/light_squeezenet.onnx    # is tuned at each share that may be chosen
        rate: 20               # requests per second
        slo_ms: 200            # within which so many of 100 are to be answered:
        percentile: 99
        tenants: [shop, press] # who must not see each other's answers
        precision: fp16        # of the tuning
      - name: detector
        artifact: runs/detector-cpu50/artifact # or a packed one, of several shares
        rate: 5
      - name: resnet
        artifacts: [a, b, c]   # models of one architecture, each with weights of its own:
        rate: 30               # three members, resnet-0 and so on, of this rate and objective each
      - name: encoder
        models: [d.onnx, e.onnx]    # the same before tuning: the first is tuned for launches of
        rate: 30               # several, and the others become tenants of its kernels
    search:
      shares: [25, 50, 75, 100]
      together: [1, 2, 4, 8]   # tenants of one architecture in a launch
      busy: 80%                # how busy a lane may be
      budget: 1m               # of each tuning
      pairs: measure           # or estimate, or none: the slowdown of one beside another
    curves: [points.json]      # measured points, profile folders
    pairs: [pairs.jsonl]       # measured pairs, also of other mixes: what estimates learn from
    memory_gib: 16             # of the device; what there is if not given
    weights_gib: 4             # of it for the weights of members of one architecture, as in a plan
    store: sqlite:////srv/team.sqlite      # a team's, as of `tunerd tune --store`
    load: {kind: bursts}       # of the proof: poisson if not given, at the rates above

Paths are relative to the file, and absolute once it is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from tunerd.colocation.documents import MIX, Part, absolute, read_yaml, validated
from tunerd.colocation.plan import ONE_TENANT, Name, PlaceKind
from tunerd.settings import texts
from tunerd.system.store_address import StoreAddress

Share = Annotated[int, Field(ge=1, le=100)]
PairsChoice = Literal["measure", "estimate", "none"]
WHOLE = 100  # percent


class Entry(Part):
    """Models of one kind: where they are, and what they are promised."""

    name: Name
    model: Path | None = None
    artifact: Path | None = None
    artifacts: tuple[Path, ...] = ()
    models: tuple[Path, ...] = ()
    rate: Annotated[float, Field(gt=0)]
    slo_ms: Annotated[float, Field(gt=0)] | None = None
    percentile: Annotated[float, Field(ge=50, lt=100)] = 99.0
    tenants: Annotated[tuple[Name, ...], Field(min_length=1)] = (ONE_TENANT,)
    precision: Literal["fp32", "tf32", "fp16", "bf16"] | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        given = (self.model, self.artifact, self.artifacts or None, self.models or None)
        if sum(each is not None for each in given) != 1:
            raise ValueError(
                f"{self.name} needs one of `model`, `artifact` and the lists `models` and "
                "`artifacts`"
            )
        if len(self.models) == 1:
            raise ValueError(f"{self.name} has one of `models`; call it `model`")
        if self.precision and self.model is None and not self.models:
            raise ValueError(f"{self.name} has a precision, which is of a `model` that is tuned")
        return self


class SearchChoice(Part):
    """What may be chosen, and what may be measured for it."""

    shares: Annotated[tuple[Share, ...], Field(min_length=1)] = (25, 50, 75, WHOLE)
    together: Annotated[tuple[Annotated[int, Field(ge=1, le=1024)], ...], Field(min_length=1)] = (
        1, 2, 4, 8, 16,
    )  # fmt: skip
    busy: Annotated[float, BeforeValidator(texts.fraction(least="above 0")), Field(gt=0, le=1)] = (
        0.8
    )
    budget: Annotated[float, BeforeValidator(texts.budget), Field(gt=0)] = 60.0
    rounds: Annotated[int, Field(ge=1, le=1000)] = 3  # in which a share is visited
    visit: Annotated[float, BeforeValidator(texts.visit), Field(ge=0.05, le=600)] = 1.0
    pairs: PairsChoice = "measure"


class ProofLoad(Part):
    kind: Literal["poisson", "bursts"] = "poisson"
    # Without one: so long that the percentiles of all can be told, within a minute.
    duration: Annotated[float, BeforeValidator(texts.duration), Field(gt=0, le=86400)] | None = None
    rounds: Annotated[int, Field(ge=1, le=1000)] = 1


def _address(given: Any) -> Any:
    return StoreAddress.parse(given) if isinstance(given, str) else given


class Mix(Part):
    """Models that are to share a device. Paths are absolute once it is read from a file."""

    version: Literal[1] = 1
    place: PlaceKind = "in-process"
    device: Literal["cpu", "cuda"] = "cpu"
    members: Annotated[tuple[Entry, ...], Field(min_length=1, max_length=1000)]
    search: SearchChoice = SearchChoice()
    curves: tuple[Path, ...] = ()
    pairs: tuple[Path, ...] = ()
    memory_gib: Annotated[float, Field(gt=0)] | None = None
    weights_gib: Annotated[float, Field(gt=0)] | None = None  # of groups; all of them if not given
    load: ProofLoad = ProofLoad()
    store: Annotated[StoreAddress | None, BeforeValidator(_address)] = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [name for entry in self.members for name in names_of(entry)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two members are called {twice[0]}; give each a name of its own")
        several = [entry.name for entry in self.members if entry.models]
        if several and self.place != "in-process":
            raise ValueError(
                f"the models of {several[0]} share a launch, which the place in-process alone has; "
                "choose it, or name each as a `model`"
            )
        return self

    @property
    def shares(self) -> tuple[int, ...]:
        """The shares that may be chosen, the whole device always among them."""
        return tuple(sorted({*self.search.shares, WHOLE}))

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a mix; InputError says what is wrong in it, and what to do."""
        path = Path(path)
        document: dict[str, Any] = read_yaml(path, MIX)
        folder = path.absolute().parent
        file = re.match("sqlite:///(.+)", str(document.get("store")))
        if file is not None:
            document["store"] = f"sqlite:///{absolute(Path(file[1]), folder)}"
        mix = validated(cls, document, path, MIX)

        def moved(given: Path | None) -> Path | None:
            return None if given is None else absolute(given, folder)

        entries = tuple(
            entry.model_copy(
                update={
                    "model": moved(entry.model),
                    "artifact": moved(entry.artifact),
                    "artifacts": tuple(absolute(each, folder) for each in entry.artifacts),
                    "models": tuple(absolute(each, folder) for each in entry.models),
                }
            )
            for entry in mix.members
        )
        return mix.model_copy(
            update={
                "members": entries,
                "curves": tuple(absolute(each, folder) for each in mix.curves),
                "pairs": tuple(absolute(each, folder) for each in mix.pairs),
            }
        )


def names_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of an entry's members: its own, or with a number where it has several."""
    count = len(entry.artifacts) or len(entry.models)
    return tuple(f"{entry.name}-{nth}" for nth in range(count)) or (entry.name,)
