"""What a dry run of a mix finds lacking, and about how long it takes to have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tunerd.colocation.planning import engine_cost, pairs
from tunerd.colocation.planning.answer import proof_secs
from tunerd.colocation.planning.mix import Entry, Mix

_START_SECS = 3.0  # of a slice or an engine: a guess, small beside the rest


@dataclass
class Lacking:
    """Steps, a line for each, in the order in which they are taken."""

    lines: list[str] = field(default_factory=list)
    secs: float = 0.0

    def add(self, what: str, secs: float) -> None:
        self.lines.append(what)
        self.secs += secs

    def add_shares(self, mix: Mix, entry: Entry, pcts: set[int]) -> None:
        """Add visits of an entry at shares."""
        shares = ", ".join(f"{pct}%" for pct in sorted(pcts))
        each = mix.search.rounds * mix.search.visit + _START_SECS
        self.add(f"measure {entry.name} at {shares}", len(pcts) * each)

    def add_launches(self, mix: Mix, entry: Entry, pct: int, count: int) -> None:
        """Add launches of so many of an entry's models at a share."""
        secs = mix.search.rounds * max(1.0, mix.search.visit) + _START_SECS
        self.add(f"measure {entry.name} at {pct}%, {count} in a launch", secs)

    def add_engine(self, mix: Mix) -> None:
        """Add what the engine takes."""
        secs = engine_cost.load_secs(min(entry.rate for entry in mix.members)) + _START_SECS
        self.add("serve all models together: what the engine takes", secs)

    def secs_in_all(self, mix: Mix, *, prove_it: bool) -> float:
        """Return about how long the same plan takes when it is no dry run; 0 if nothing lacks.

        Pairs and the proof are of a plan that is not known yet: all entries are taken to be pairs.
        """
        if not self.lines:
            return 0.0
        secs = self.secs
        if mix.search.pairs == "measure":
            of_pair = pairs.ROUNDS * pairs.ROUND_SECS * 3 + _START_SECS  # each alone, and both
            secs += math.comb(len(mix.members), 2) * of_pair
        return secs + (proof_secs(mix) * mix.load.rounds + _START_SECS if prove_it else 0.0)
