"""The store of a run: every trial from its proposal to its end, and what it was measured on.

schema (tables) <- opened (files and servers) <- rows (values to rows and back) <- store (the one
writer, any reader) <- export (a line per trial), tvm_database (TVM's own format), merge (runs
into one). points: what plans of mixes measured, in a team's store.
"""

from __future__ import annotations

from tunerd.records.facts import RunFacts
from tunerd.records.store import Store

__all__ = ["RunFacts", "Store"]
