"""The file that says who shares a device, and how: read, checked, written.

    version: 1
    place: in-process          # or processes, on CPUs; or mps: processes that share a GPU
    device: cpu                # or cuda: the first GPU that the process sees
    policy: {kind: ordered, patience_ms: 50}
    members:
      - name: detector
        artifact: runs/detector-cpu50/artifact     # relative to this file
        sha256: 5f1c...        # of its manifest.json; what differs is not loaded
        share: 50              # percent of the device; or cores: [0, 1]
        shares: [70, 30]       # what Engine.reshare may give it instead while it serves
        lane: left             # members of one lane have its share together, and turns in it
        tenants: [shop, press]
        slo_ms: 30             # the deadline of requests that name none
        weight: 2              # of its share of the device's time, where time is short
        limit_ms: 500          # what takes longer is evicted
        rate: 20               # requests per second, of `tunerd colocate bench`
        clients: 2             # or always so many requests of each tenant, whatever the load is
      - ...
    load: {kind: closed, reshare_every: 100ms}   # what `tunerd colocate bench` sends, and changes

`tunerd colocate regulate` writes after which kernels models stop, which parts of them do not run at
once, and what was measured of that:

    policy:
      kind: regulated
      stops: {detector: [12, 31], encoder: []}
      apart: ["detector:0 encoder:0"]    # the first part of one beside that of the other

Members of one architecture, each with weights of its own, run as one where an artifact among them
has kernels for several tenants: the others' may be artifacts for one model, or what `tunerd tenant`
writes. With

    policy: {kind: space-time, slices: 4, together: 8, window_ms: 1}

up to `together` of their requests are in one launch, in each of `slices` (or of a list of shares);
with `slices: lanes` in the lanes that members name, each for its own. A member whose artifact has
batches (`tunerd tune --batch 1,4,8`) has launches of several requests in the same way: the artifact
says which batches there are. With

    weights_gib: 20

the weights of such members, where they are not batches, have so much of the device's memory, on
CPUs of each slice's: who was not asked for longest has its weights brought again when it is.

Who reads it needs none of the places, policies or models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tunerd.colocation.documents import PLAN, Part, absolute, read_yaml, sentence, validated
from tunerd.errors import InputError
from tunerd.settings import texts
from tunerd.system.files import write_whole

VERSION = 1
ONE_TENANT = "default"
_PERCENT = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,3})?)\s*%")
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Name = Annotated[str, Field(pattern=_NAME)]
PlaceKind = Literal["in-process", "processes", "mps"]
LoadKind = Literal["closed", "poisson", "bursts", "trace"]


def _percent(value: Any) -> Any:
    """Read `80%` or 80."""
    found = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) if found else value


def _load(value: Any) -> Any:
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return {"kind": "poisson", "of_capacity": value}
    return value


class Member(Part):
    """One tuned model and what it is promised."""

    name: Name
    artifact: Path
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    share: Annotated[int, Field(ge=1, le=100)] | None = None
    shares: tuple[Annotated[int, Field(ge=1, le=100)], ...] = ()
    cores: tuple[Annotated[int, Field(ge=0)], ...] = ()
    lane: Name | None = None
    tenants: Annotated[tuple[Name, ...], Field(min_length=1)] = (ONE_TENANT,)
    slo_ms: Annotated[float, Field(gt=0)] | None = None
    weight: Annotated[float, Field(gt=0)] = 1.0
    limit_ms: Annotated[float, Field(gt=0)] | None = None
    rate: Annotated[float, Field(gt=0)] | None = None
    clients: Annotated[int, Field(ge=1, le=1000)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.share is not None and self.cores:
            raise ValueError(f"{self.name} has both a share and cores; leave one of them out")
        if self.shares and self.share is None:
            raise ValueError(f"{self.name} has `shares` to change to, and no `share` to begin with")
        if self.rate is not None and self.clients is not None:
            raise ValueError(f"{self.name} has both a rate and clients; leave one of them out")
        for what, values in (("tenant", self.tenants), ("core", self.cores)):
            if len(set(values)) < len(values):
                raise ValueError(f"{self.name} names a {what} twice")
        return self


class PolicyChoice(BaseModel):
    """Its kind, and parameters that are the policy's own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    kind: str

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Kill(Part):
    """A member whose process is killed, so long after a load has begun."""

    member: Name
    after: Annotated[float, BeforeValidator(texts.duration), Field(gt=0)]


class Fault(Part):
    """A member that is sent one request that makes it fault, so long after a load has begun.

    inputs: an .npz file of the request's arrays, named as the member's inputs. They make its
    artifact fault, as where it reads an address at which nothing is mapped.
    """

    member: Name
    after: Annotated[float, BeforeValidator(texts.duration), Field(gt=0)]
    inputs: Path


class LoadChoice(Part):
    """What `tunerd colocate bench` asks of the members.

    closed: `clients` per tenant, each sends when it has its answer. poisson: at each member's
    rate, split over its tenants. bursts: the same rate on average, `burst_times` it in bursts.
    trace: a CSV file with the columns secs, member and, if you like, tenant.

    of_capacity: instead of rates, this percentage of what each member gets in a closed loop under
    the plan's policy, which is measured first. `load: 80%` is that as a Poisson load.
    alone: members that are sent their load alone, too, in turns with that of all, `rounds` times;
    or lanes, whose members are sent it together.
    reshare_every: so often all members get their next `shares` while they serve, after the last
    the first again.
    kill: a member whose process is killed meanwhile, as where memory runs out. An open load sends
    it requests while it is away.
    fault: a member that is sent a request meanwhile that makes it fault, as any other request of
    it. The rest is as with `kill`.
    """

    kind: LoadKind = "closed"
    duration: Annotated[float, BeforeValidator(texts.duration), Field(gt=0, le=86400)] = 10.0
    clients: Annotated[int, Field(ge=1, le=1000)] = 1
    burst_times: Annotated[float, Field(gt=1, le=100)] = 6.0
    of_capacity: Annotated[float, BeforeValidator(_percent), Field(gt=0, le=1000)] | None = None
    alone: tuple[Name, ...] = ()
    rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    reshare_every: Annotated[float, BeforeValidator(texts.duration), Field(gt=0)] | None = None
    kill: Kill | None = None
    fault: Fault | None = None
    trace: Path | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if (self.kind == "trace") != (self.trace is not None):
            raise ValueError("a load of kind trace, and no other, names a file in `trace`")
        if self.of_capacity is not None and self.kind not in ("poisson", "bursts"):
            raise ValueError("`of_capacity` is for loads of kind poisson or bursts")
        if self.kill is not None and self.fault is not None:
            raise ValueError("a load has `kill` or `fault`; leave one of them out")
        after = {
            what: each.after
            for what, each in (("kill", self.kill), ("fault", self.fault))
            if each is not None
        }
        for what, secs in {"reshare_every": self.reshare_every, **after}.items():
            if secs is not None and secs >= self.duration:
                raise ValueError(f"`{what}` is not within the duration; give a longer duration")
            if secs is not None and self.alone:
                raise ValueError(f"a load has `{what}` or `alone`; leave one of them out")
        return self

    @property
    def outage(self) -> Kill | Fault | None:
        """Who is taken out while the load runs, and when."""
        return self.kill or self.fault


class Proof(Part):
    """What a lane obtained when the plan was checked.

    which: the numbers of the SMs on which its work was seen to run, or of its cores, as `0-15,32`;
    "" where nobody says, as under a limit of MPS.
    """

    lane: str
    device: str
    units: int  # SMs, on CPUs cores
    mechanism: str
    which: str = ""


class Measured(Part):
    """What members got under a policy while all were busy, when a regulation was looked for.

    work: what they got per second, in seconds that it takes when each runs alone.
    """

    policy: str
    secs: float
    work: float
    per_sec: dict[str, float]
    p99_ms: dict[str, float]


class Plan(Part):
    """Who shares a device. Paths are absolute once it is read from a file."""

    version: Literal[1] = 1
    place: PlaceKind = "in-process"
    device: Literal["cpu", "cuda"] = "cpu"
    policy: PolicyChoice = PolicyChoice(kind="space")
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=1000)]
    order: tuple[str, ...] = ()  # in which members are loaded; as listed if not given
    weights_gib: Annotated[float, Field(gt=0)] | None = None  # of groups; all of them if not given
    load: Annotated[LoadChoice, BeforeValidator(_load)] = LoadChoice()
    proofs: tuple[Proof, ...] = ()
    measured: tuple[Measured, ...] = ()  # by `tunerd colocate regulate`

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [member.name for member in self.members]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two members are called {twice[0]}; give each a name of its own")
        if self.order and sorted(self.order) != sorted(names):
            raise ValueError("`order` must name each member once, or be left out")
        if any(m.share for m in self.members) and any(not (m.share) for m in self.members):
            raise ValueError("either every member has a share, or none has")
        if len({len(m.shares) for m in self.members}) > 1:
            raise ValueError("every member needs as many `shares`: the first of all go together")
        for members in self.layouts:
            lanes: dict[str, Member] = {}
            for m in members:
                first = lanes.setdefault(lane_of(m), m)
                if (m.share, m.cores) != (first.share, first.cores):
                    raise ValueError(
                        f"{first.name} and {m.name} are of one lane; give them the same share"
                    )
            if (total := sum(m.share or 0 for m in lanes.values())) > 100:
                raise ValueError(f"the shares come to {total}%, which is more than the device has")
        if any(m.cores for m in self.members) and not all(m.cores for m in self.members):
            raise ValueError("either every member has cores, or none has")
        cores = [core for m in {lane_of(m): m for m in self.members}.values() for core in m.cores]
        if len(set(cores)) < len(cores):
            raise ValueError("two members have a core in common; give each its own")
        if unknown := {name for name in self.load.alone if not members_of(self.members, name)}:
            raise ValueError(f"load.alone: there is no member or lane '{min(unknown)}'")
        if self.load.reshare_every is not None and len(self.layouts) < 2:
            raise ValueError("load.reshare_every: give every member `shares` to change to")
        if (outage := self.load.outage) is not None and outage.member not in names:
            what = "kill" if self.load.kill else "fault"
            raise ValueError(f"load.{what}: there is no member '{outage.member}'")
        if self.load.kill is not None and self.place != "processes":
            raise ValueError(
                f"load.kill: the place {self.place} has no process of a member that may be "
                "killed; choose `place: processes`"
            )
        if self.load.fault is not None and self.place == "in-process":
            apart = "mps" if self.device == "cuda" else "processes"
            raise ValueError(
                "load.fault: all members share one process in the place in-process, and a fault "
                f"would end them all; choose `place: {apart}`"
            )
        if self.load.of_capacity is not None:
            for member in self.members:
                if member.rate is not None:
                    raise ValueError(
                        f"{member.name} has a rate, and the load is a part of the capacity; leave "
                        "one of them out"
                    )
        return self

    @property
    def ordered(self) -> tuple[Member, ...]:
        """The members in the order in which they are loaded."""
        by_name = {member.name: member for member in self.members}
        return tuple(by_name[name] for name in self.order) or self.members

    @property
    def layouts(self) -> tuple[tuple[Member, ...], ...]:
        """The members in order with the shares that they begin with, and with each of the others.

        The first of all members' `shares` go together, the second, and so on.
        """
        others = range(len(self.members[0].shares))
        changed = [
            tuple(m.model_copy(update={"share": m.shares[nth]}) for m in self.ordered)
            for nth in others
        ]
        return (self.ordered, *changed)

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a plan; InputError says what is wrong in it, and what to do."""
        path = Path(path)
        plan = validated(cls, read_yaml(path, PLAN), path, PLAN)
        return plan._moved(path.absolute().parent)

    def with_load(self, changes: Mapping[str, Any]) -> Self:
        """Return the plan with another load; InputError where that cannot be."""
        said = self.load.model_dump() | dict(changes)
        if changes.get("kind") in ("closed", "trace"):
            said["of_capacity"] = None
        try:
            load = LoadChoice.model_validate(said)
        except ValidationError as error:
            raise InputError(f"load: {sentence(error, LoadChoice)}") from None
        return self.model_copy(update={"load": load})

    def write(self, path: Path) -> None:
        """Write the plan, with paths relative to the file where they lie beside or below it."""
        folder = path.absolute().parent
        said = self.model_dump(mode="json", exclude_defaults=True)
        document: dict[str, Any] = {
            "version": self.version,
            "policy": self.policy.model_dump(mode="json"),
        } | said
        for member in document["members"]:
            member["artifact"] = _relative(Path(member["artifact"]), folder)
        if self.load.trace is not None:
            document["load"]["trace"] = _relative(self.load.trace, folder)
        if self.load.fault is not None:
            document["load"]["fault"]["inputs"] = _relative(self.load.fault.inputs, folder)
        write_whole(path, yaml.safe_dump(document, sort_keys=False), shared=True)

    def _moved(self, folder: Path) -> Self:
        members = tuple(
            m.model_copy(update={"artifact": absolute(m.artifact, folder)}) for m in self.members
        )
        load = self.load
        if load.trace is not None:
            load = load.model_copy(update={"trace": absolute(load.trace, folder)})
        if (fault := load.fault) is not None:
            fault = fault.model_copy(update={"inputs": absolute(fault.inputs, folder)})
            load = load.model_copy(update={"fault": fault})
        return self.model_copy(update={"members": members, "load": load})


def lane_of(member: Member) -> str:
    """Return the name of the lane that is a member's own, or that it has with others."""
    return member.lane or member.name


def members_of(members: Sequence[Member], name: str) -> tuple[Member, ...]:
    """Return the member of this name, or those of the lane; nothing where there is neither."""
    named = tuple(m for m in members if m.name == name)
    return named or tuple(m for m in members if m.lane == name)


def shares_of(members: Sequence[Member]) -> dict[str, int]:
    """Return each member's share in percent; equal ones of each lane where the plan has none."""
    equal = max(1, 100 // len({lane_of(member) for member in members}))
    return {member.name: member.share or equal for member in members}


def _relative(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
