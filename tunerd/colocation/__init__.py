"""Several tuned models share one device: an engine, without a server in it.

    plan = Plan.read("plan.yaml")
    with Engine(plan) as engine:
        outputs = engine.submit("detector", {"x": image}, deadline_secs=0.02).result()

Parts, in the order in which a request meets them:

    plan.py        the file: members (artifacts), their shares and SLOs, the place, the policy
    engine.py      loads the members, takes requests, counts
    dispatcher.py  the thread that decides
    loader.py      the threads that load again after faults, and try whose they were
    scheduler.py   events in, instructions out; no clock, no thread
    suspects.py    whose a fault may have been
    time_limits.py when what runs is evicted
    undisturbed.py what the process has that would hold all up
    board.py       what waits and what runs: what the scheduler changes, and policies see
    policies/      which waiting request goes to which idle lane; one file each
    accounts.py    what each queue has had of the device's time
    regulation/    where models stop, and which parts do not run at once, found by measuring
    groups.py      whose requests may be in one launch, by their artifacts: tenants, batches
    buffers.py     memory for inputs that the device reads itself
    estimates.py   how long a member takes on a lane, learned from what it took
    rates.py       how soon a request comes that may have company, by the last ones
    margin.py      how much earlier than their deadlines requests are to end, by who was late
    places/        where members run: threads of this process, streams of a GPU, runner processes
    load/          arrivals of requests, and what came of them, for `tunerd colocate bench`
    placement/     which device of several gets which job, apart from the engine

A **lane** is a part of the device on which one segment runs at a time: cores, a stream, a green
context. A **seat** is a member loaded for a lane. A policy lays out the lanes (one for all, one
each), the place cuts the device into them and loads the seats. A plan may name several
**layouts**, the same members at other shares: all are loaded, and one is in use at a time. A model
is one **segment** or several (`artifacts/segments.py`); between two of them another member may have
the lane. What nobody waits for runs on without asking.

Members of one architecture, with weights of their own and kernels for several of them at once, may
be loaded as one **group**; a member whose artifact has several batches is one, too. A **launch** of
its seat takes several requests, and the policy `space-time` says which. Each has its own answer.

The way of a request, and whose thread does what:

    caller's thread     submit: checks names, shapes and types -> inbox
    dispatcher thread   inbox -> scheduler -> policy -> place.start
    caller's thread     the same for a request that comes by itself while that thread sleeps
    seat's thread       on CPUs and in runners: runs segments to the end, or to a pause -> inbox
    dispatcher thread   on a GPU: sees what has ended; whoever is next, or the answers
    loader thread       loads a seat again after a fault, one at a time -> inbox

One of them decides at a time. So a policy sees all queues at one moment and needs no lock, and a
slow load stops nobody. What has
come meanwhile is taken at once: the busier the engine is, the less a request costs. A caller that
holds a future's callback up holds the dispatcher up: callbacks are to be short.

What goes wrong has an owner. A fault fails the request it hit, and its member by name; the seats
that were lost with it are fenced and loaded again, and requests of others that they held run once
more. A member that exceeds its time is evicted, which is the same for its seat alone. What cannot
end in time is refused early, where the policy knows, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunerd.system.lazy_names import lazy_name

if TYPE_CHECKING:
    from tunerd.colocation.engine import Engine
    from tunerd.colocation.places.gpu_context import MpsClientWarning
    from tunerd.colocation.plan import Plan
    from tunerd.colocation.work import MemberError, RefusedError

_MODULES = {
    "tunerd.colocation.engine": ("Engine",),
    "tunerd.colocation.places.gpu_context": ("MpsClientWarning",),
    "tunerd.colocation.plan": ("Plan",),
    "tunerd.colocation.work": ("MemberError", "RefusedError"),
}

__all__ = ["Engine", "MemberError", "MpsClientWarning", "Plan", "RefusedError"]


def __getattr__(name: str) -> Any:
    return lazy_name(__name__, _MODULES, name)
