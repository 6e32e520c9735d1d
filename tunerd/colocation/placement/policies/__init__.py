"""Policies by name; a further one is a file and a line here."""

from __future__ import annotations

from tunerd.colocation.placement.policies.base import Policy
from tunerd.colocation.placement.policies.estimated import Estimated
from tunerd.colocation.placement.policies.exclusive import Exclusive
from tunerd.colocation.placement.policies.least_utilised import LeastUtilised
from tunerd.colocation.placement.policies.most_free_memory import MostFreeMemory
from tunerd.colocation.placement.policies.round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {
    policy.kind: policy
    for policy in (Exclusive, RoundRobin, LeastUtilised, MostFreeMemory, Estimated)
}
