"""Policies by the name that a plan gives them; a further one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from tunerd.colocation.policies.base import Policy
from tunerd.colocation.policies.ordered import Ordered
from tunerd.colocation.policies.regulated import Regulated
from tunerd.colocation.policies.space import Space
from tunerd.colocation.policies.space_time import SpaceTime
from tunerd.colocation.policies.streams import Streams
from tunerd.colocation.policies.time import Time
from tunerd.errors import InputError

POLICIES: dict[str, type[Policy]] = {
    policy.kind: policy for policy in (Time, Streams, Space, Ordered, Regulated, SpaceTime)
}


def policy_of(kind: str, parameters: Mapping[str, Any]) -> Policy:
    """Return a policy with these parameters; InputError names what is allowed."""
    if kind not in POLICIES:
        raise InputError(f"there is no policy '{kind}'; there are {', '.join(POLICIES)}")
    policy = POLICIES[kind]
    try:
        return policy.model_validate(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        allowed = ", ".join(policy.model_fields) or "none"
        raise InputError(
            f"policy {kind}: {name}: {first['msg']}; its parameters are {allowed}"
        ) from None
