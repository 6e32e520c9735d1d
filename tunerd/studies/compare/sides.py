"""What is compared: a run with its stored samples, or an artifact to be measured.

`load_sides` is the one door: another kind of source needs a function that returns a Side, and a
line in `_load`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunerd.artifacts.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    pcts_of,
    read_variants,
    shares_text,
)
from tunerd.errors import FolderError, InputError, WrongResultError
from tunerd.records import Store, typed
from tunerd.records.finding import RunQuery
from tunerd.records.outcome import task_outcomes_from_json
from tunerd.records.paths import Paths
from tunerd.records.schema import STORE_NAME
from tunerd.stats.gate import Timing
from tunerd.system.store_address import StoreAddress
from tunerd.system.text import reason_of
from tunerd.vocabulary import (
    AS_EXPORTED,
    CapProof,
    Measurement,
    TensorSpec,
    architecture,
    unit_name,
)
from tunerd.vocabulary.outcome import Latency, TaskOutcome, Verification
from tunerd.vocabulary.verdict import Verdict

# Of a call, and calls of a task: what is beyond can be of no run, and ratios of it overflow.
_MIN_SECS, _MAX_SECS, _MAX_WEIGHT = 1e-12, 1e9, 2**31


@dataclass(frozen=True)
class TaskTiming:
    """The samples of a task's winner and, as its control, of its default schedule."""

    task_id: str
    name: str
    weight: int
    candidate_id: str
    timing: Timing = field(repr=False)


@dataclass(frozen=True)
class Place:
    """Where it was tuned, and where its stored samples were taken. SMs are cores on CPUs."""

    device: str
    sm_counts: tuple[int, ...]
    mechanism: str
    driver: str


@dataclass(frozen=True)
class Side:
    """One of the two that are compared. None where a source does not have it."""

    source: str  # as it was named
    model_name: str
    model_digest: str
    inputs: tuple[TensorSpec, ...]
    target_kind: str
    architecture: str
    pcts: tuple[int, ...]  # shares that it is tuned for; a packed artifact has several
    precision: str  # that its kernels compute in, or as exported
    versions: Mapping[str, str]
    place: Place | None = None
    timing: Timing | None = field(default=None, repr=False)  # end to end
    tasks: tuple[TaskTiming, ...] = field(default=(), repr=False)
    artifact: Path | None = field(default=None, repr=False)
    run: str = ""  # the identity of a run

    @property
    def unit(self) -> str:
        return unit_name(self.target_kind)


def load_sides(base: str, new: str) -> tuple[Side, Side]:
    """Load what two run folders, artifact folders or queries of a team's store have to compare.

    The run that a query finds is never the other side itself, and has the other's precision, unless
    the query names one, or a run. Raises InputError for anything else,
    FolderError or StoreError for a run that has not ended or is damaged, LoadError for an artifact
    that is not whole, and WrongResultError for a run whose model disagrees with its reference.
    """
    if is_query(base):
        second = _load(new)
        return _load(base, beside=second), second
    first = _load(base)
    return first, _load(new, beside=first)


def _load(source: str, *, beside: Side | None = None) -> Side:
    if is_query(source):
        return _side_of_query(source, beside)
    folder = Path(source)
    try:
        if (folder / STORE_NAME).is_file():
            return _side_of_run(source, folder)
        if (folder / MANIFEST).is_file():
            return _side_of_artifact(source, folder)
    except (OSError, ValueError) as error:
        reason = reason_of(error)
        raise InputError(f"{source} cannot be read: {reason}; {_WANTED}") from error
    raise InputError(f"{source} is no run folder and no artifact; {_WANTED}")


_WANTED = (
    "give a folder that `tunerd tune` wrote with --out, the artifact in it, or a store's run as "
    "sqlite:////folder/team.sqlite#model=NAME,share=gpu40"
)


def differences(base: Side, new: Side, *, measured: bool) -> Iterator[str]:
    """Say what keeps two sides from being compared; `measured`: at one share, here and now."""
    pairs: dict[str, tuple[str, str]] = {
        "model": (_model(base), _model(new)),
        "inputs": (_shapes(base.inputs), _shapes(new.inputs)),
        "target": (_target(base), _target(new)),
        "precision": (base.precision, new.precision),
    }
    if not measured and base.place is not None and new.place is not None:
        one, other = base.place, new.place
        pairs |= {
            "device": (one.device, other.device),
            base.unit: (_counts(one), _counts(other)),
            "kind of slice": (one.mechanism, other.mechanism),
            "driver": (one.driver, other.driver),
        }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield f"{what}: {ours or 'unknown'} and {theirs or 'unknown'}"


def _counts(place: Place) -> str:
    return " or ".join(map(str, place.sm_counts))


def _model(side: Side) -> str:
    return f"{side.model_name} (sha256 {side.model_digest[:12]})"


def _shapes(inputs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{i.name} {i.dtype}{list(i.shape)}" for i in inputs)


def _target(side: Side) -> str:
    return f"{side.target_kind} {side.architecture}".strip()


# --- runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _NamedModel:
    name: str
    digest: str
    inputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class _Ended:
    """What is read of a stored outcome, less its tasks."""

    model: _NamedModel
    verification: Verification
    latencies: tuple[Latency, ...]
    proofs: tuple[CapProof, ...]


def is_query(source: str) -> bool:
    """Say whether a source is a team's store and not a folder."""
    return source.startswith(("sqlite:", "postgresql:", "postgresql+"))


def _side_of_query(source: str, beside: Side | None) -> Side:
    """Return the newest run of a team's store that is asked for.

    As in ADDRESS#model=NAME,share=gpu40,precision=fp16,run=IDENTITY.
    """
    text, _, asked = source.partition("#")
    words = [word.partition("=")[::2] for word in filter(None, asked.split(","))]
    keys = dict(words)
    if unknown := [key for key, _ in words if key not in _KEYS]:
        raise InputError(
            f"a store is asked by {', '.join(_KEYS)}, and not by '{unknown[0]}'; {_WANTED}"
        )
    try:
        address = StoreAddress.parse(text)
    except ValueError as error:
        raise InputError(f"the store cannot be used: {error}") from None
    if address.password is not None:
        raise InputError(
            f"the address of {address.shown} holds a password, which everybody on this machine "
            "can read; leave it out and set PGPASSWORD or ~/.pgpass"
        )
    if beside is not None and not {"precision", "run"} & keys.keys():
        keys["precision"] = beside.precision
    query = RunQuery(**keys, except_run=beside.run if beside is not None else "")
    with Store.find_shared(address, query) as store:
        return _side_of_store(source, store, None)


_KEYS = ("model", "share", "precision", "run")


def _side_of_run(source: str, folder: Path) -> Side:
    with Store.read(folder) as store:
        return _side_of_store(source, store, Paths(folder).artifact)


def _side_of_store(source: str, store: Store, artifact: Path | None) -> Side:
    facts = store.facts()
    value = store.outcome()
    if value is None:
        raise FolderError(
            f"{source} holds a run that has not ended, so nothing of it is measured end to "
            "end; run its command again, or give another folder"
        )
    try:
        ended = typed.of_kind(_Ended, value)
        samples = {latency.name: latency.run_secs for latency in ended.latencies}
        timing = Timing(_times(samples["tuned"]), _times(samples.get("default", ())))
        timings = map(_task_timing, task_outcomes_from_json(value["tasks"]))
        tasks = tuple(timing for timing in timings if timing is not None)
    except (ValueError, LookupError) as error:
        raise store.damaged(str(error)) from error
    if ended.verification.verdict is Verdict.WRONG:
        raise WrongResultError(
            f"the model of {source} disagrees with {ended.verification.reference} "
            f"({ended.verification.message}), so its speed says nothing; tune again, or give "
            "another run"
        )
    return Side(
        source=source,
        model_name=ended.model.name,
        model_digest=ended.model.digest,
        inputs=ended.model.inputs,
        target_kind=facts.target.kind,
        architecture=architecture(facts.target.json),
        pcts=(facts.pct,),
        precision=facts.precision_text,
        versions={"tunerd": facts.tunerd_version, "tvm": facts.tvm_version},
        place=_place(facts.device, ended.proofs),
        timing=timing,
        tasks=tasks,
        artifact=artifact,
        run=store.identity,
    )


def _place(device: str, proofs: Sequence[CapProof]) -> Place:
    first = proofs[0] if proofs else None
    return Place(
        device=first.device if first else device,
        sm_counts=tuple(sorted({proof.sm_count for proof in proofs})),
        mechanism=first.mechanism if first else "",
        driver=first.driver if first else "",
    )


def _task_timing(task: TaskOutcome) -> TaskTiming | None:
    """Return the samples of a task's winner, None where it was not measured in the end."""
    measured = {f.candidate_id: f.measurement for f in task.finalists}
    winner = measured.get(task.winner.candidate_id)
    if not isinstance(winner, Measurement):
        return None
    if not 0 < task.weight < _MAX_WEIGHT:
        raise ValueError(f"a task that is called {str(task.weight)[:40]} times")
    defaults = (f.measurement for f in task.finalists if f.is_default)
    default = next((m.run_secs for m in defaults if isinstance(m, Measurement)), ())
    return TaskTiming(
        task_id=task.task_id,
        name=task.name,
        weight=task.weight,
        candidate_id=task.winner.candidate_id,
        timing=Timing(_times(winner.run_secs), _times(default)),
    )


def _times(secs: tuple[float, ...]) -> tuple[float, ...]:
    if not all(_MIN_SECS < each < _MAX_SECS for each in secs):
        raise ValueError(f"what can be no time of a call: {secs[:8]}")
    return secs


# --- artifacts ---------------------------------------------------------------------------------


def _side_of_artifact(source: str, folder: Path) -> Side:
    """Return an artifact without samples: whoever has two of them can measure both in turns."""
    variants = read_variants(folder)
    check_files(folder, variants)
    first = variants[0]
    return Side(
        source=source,
        model_name=first["model"]["name"],
        model_digest=_text(first["model"], "digest"),
        inputs=tuple(TensorSpec(i["name"], tuple(i["shape"]), i["dtype"]) for i in first["inputs"]),
        target_kind=first["target"]["kind"],
        architecture=architecture(_text(first["target"], "json")),
        pcts=pcts_of(variants),
        precision=" and ".join(sorted({_text(v, "precision") or AS_EXPORTED for v in variants})),
        versions=_versions(first),
        place=_place_of_tuning(variants),
        artifact=folder,
    )


def _place_of_tuning(variants: Sequence[Manifest]) -> Place:
    share = variants[0]["share"]
    counts = {count for variant in variants for count in variant["share"]["sm_counts"]}
    return Place(
        device=_text(share, "device"),
        sm_counts=tuple(sorted(counts)),
        mechanism=_text(share, "mechanism"),
        driver=_text(share, "driver"),
    )


def _versions(manifest: Manifest) -> dict[str, str]:
    versions = manifest.get("versions")
    if not isinstance(versions, dict):
        return {}
    return {name: _text(versions, name) for name in ("tunerd", "tvm")}


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def share_problem(base: Side, new: Side) -> str:
    """Say why two sides name no one share at which both can be measured, or nothing."""
    named = {pct for side in (base, new) for pct in side.pcts}
    if len(named) == 1:
        return ""
    flag = "--gpu-pct" if base.target_kind == "cuda" else "--cpu-pct"
    texts = (f"{side.source} is for {shares_text(side.pcts)}" for side in (base, new))
    return f"share: {', '.join(texts)}; name the one to measure both at with {flag}"
