"""What benches say of one model beside another, kept with both for plans and for estimates.

A bench gives pairs only where exactly two models ran beside each other, each always busy in a slice
of its own, and an alone-time exists for each, measured in turns. Otherwise it gives none: memory
hogs, several neighbours, members that share a lane or the whole device, loads of other kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tunerd.api.mix_sources import kind_of_machine
from tunerd.colocation.plan import lane_of, shares_of
from tunerd.colocation.planning.features import architecture_of, at_share, features_of
from tunerd.colocation.planning.kept import keep_pairs
from tunerd.colocation.planning.pairs import Pair, Side

if TYPE_CHECKING:
    from tunerd.colocation.bench import Benched
    from tunerd.studies.bench.artifact import BenchResult

_LEAST_ROUNDS = 2  # of one the interval has no width


def pairs_of_bench(found: BenchResult) -> tuple[Pair, ...]:
    """Return how much an artifact and its neighbour slow each other, as `tunerd bench` found it.

    Both ways beside another artifact; one way of two copies, whose alone-time is the first one's.
    Nothing where more or fewer ran, or beside a memory hog. Raises LoadError where a folder is no
    artifact any more.
    """
    from tunerd.studies.bench.artifact import COPIES, HOG

    request, bench = found.request, found.bench
    if request.beside in (None, HOG) or len(found.proofs) != 2 or bench.slowdown is None:
        return ()
    device, source = found.proofs[0].device, f"tunerd bench, {request.kind} slices"
    of = _side(request.model, request.artifact, request.pct)
    if request.beside == COPIES:
        return (Pair(of, of, device, bench.slowdown.interval, source),)
    if bench.neighbour_slowdown is None:
        return ()
    neighbour = Path(str(request.beside))
    beside = _side(_name(neighbour), neighbour, request.pct)
    return (
        Pair(of, beside, device, bench.slowdown.interval, source),
        Pair(beside, of, device, bench.neighbour_slowdown.interval, source),
    )


def keep_pairs_of_bench(found: BenchResult) -> None:
    """Keep them in the run folders of both artifacts, with the device and the host."""
    pairs = pairs_of_bench(found)
    if pairs:
        request = found.request
        sides = [request.artifact, Path(str(request.beside))]
        _keep("cuda" if request.kind == "mps" else "cpu", sides, pairs)


def pairs_of_colocation(found: Benched) -> tuple[Pair, ...]:
    """Return how much two members of a plan slow each other, as `tunerd colocate bench` found it.

    Of a plan of two members in lanes of their own under the policy `space`, with a closed load that
    names both under `alone`, of two rounds at least; nothing otherwise, or where one of them
    answered too little for a median.
    """
    plan, load = found.plan, found.plan.load
    names = [member.name for member in plan.members]
    if (
        len(names) != 2
        or len({lane_of(member) for member in plan.members}) != 2
        or any(member.cores for member in plan.members)  # nobody says which share these are
        or load.kind != "closed"
        or {*load.alone} != {*names}
        or load.rounds < _LEAST_ROUNDS
    ):
        return ()
    result = next((each for each in found.results if each.policy == "space"), None)
    if result is None:
        return ()
    slowdowns = {each.member: each.p50 for each in result.against_alone}
    share_of, kernels = shares_of(plan.members), _kernels(found)
    sides = [_side(name, kernels[name], share_of[name]) for name in names]
    device, source = _device(plan.device), f"tunerd colocate bench, {plan.place}"
    pairs = [
        Pair(of, beside, device, slowdown, source)
        for of, beside in (sides, sides[::-1])
        if (slowdown := slowdowns[of.name]) is not None
    ]
    return tuple(pairs) if len(pairs) == 2 else ()


def keep_pairs_of_colocation(found: Benched) -> None:
    """Keep them in the run folders of both artifacts, with the device and the host."""
    pairs = pairs_of_colocation(found)
    if pairs:
        _keep(found.plan.device, [*_kernels(found).values()], pairs)


def _side(name: str, artifact: Path, share: int) -> Side:
    features = at_share(features_of(artifact).named(), share)
    return Side(name, architecture_of(artifact), share, features)


def _name(artifact: Path) -> str:
    from tunerd.artifacts.manifest import read_all_variants

    return str(read_all_variants(artifact)[0]["model"]["name"])


def _kernels(found: Benched) -> dict[str, Path]:
    from tunerd.colocation.groups import groups_of, kernels_of

    members = found.plan.members
    return kernels_of(members, groups_of(members, 1))


def _device(device: Literal["cpu", "cuda"]) -> str:
    from tunerd.system import host

    facts = host.facts()
    return facts.gpus[0].name if device == "cuda" and facts.gpus else facts.cpu_model


def _keep(device: Literal["cpu", "cuda"], sides: list[Path], pairs: tuple[Pair, ...]) -> None:
    from tunerd.system import host

    keep_pairs(sides, pairs, kind_of_machine(device, host.facts()))
