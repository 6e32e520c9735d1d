"""Who runs beside whom in a placement, and so which pairs a plan rests on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tunerd.colocation.planning import features
from tunerd.colocation.planning.pairs import Side
from tunerd.colocation.planning.placement import Placement, Subject


def neighbours(
    placement: Placement, subjects: Sequence[Subject]
) -> Iterator[tuple[tuple[Side, Subject], tuple[Side, Subject]]]:
    """Yield who runs beside whom at which shares; of slices that serve everyone one of an entry."""
    by_name = {subject.name: subject for subject in subjects}
    if placement.kind == "space-time":
        share = placement.lanes[0].share
        firsts = list({subject.of: subject for subject in reversed(subjects)}.values())
        chosen = itertools.combinations_with_replacement(firsts, 2)
        for one, two in chosen if len(placement.lanes) > 1 else ():
            yield (_side(one, share), one), (_side(two, share), two)
        return
    for first, second in itertools.combinations(placement.lanes, 2):
        for names in itertools.product(first.members, second.members):
            one, two = (by_name[name] for name in names)
            yield (_side(one, first.share), one), (_side(two, second.share), two)


def _side(subject: Subject, share: int) -> Side:
    of = features.at_share(subject.features, share)
    return Side(subject.name, subject.architecture or subject.of, share, of)
