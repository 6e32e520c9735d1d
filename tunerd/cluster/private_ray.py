"""What tunerd takes of `ray._private` and `ray._raylet`, which any version of Ray may change.

Nothing else in tunerd names them. Each use has a fallback on Ray's public API: where a name is
missing, Ray starts as it comes, which takes longer and starts more processes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from tunerd.errors import InfrastructureError

log = logging.getLogger(__name__)

_NODE_LOOK_SECS = 0.02
# The function that begins the command of each agent, and the files in which that leaves its ports.
_COMMAND_OF_AGENT = "_build_python_executable_command_memory_profileable"
_AGENT_PORTS = {
    "PROCESS_TYPE_DASHBOARD_AGENT": (
        "METRICS_AGENT_PORT_NAME",
        "METRICS_EXPORT_PORT_NAME",
        "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    ),
    "PROCESS_TYPE_RUNTIME_ENV_AGENT": ("RUNTIME_ENV_AGENT_PORT_NAME",),
}
_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def _found(module: str, name: str) -> Any | None:
    """Return what a module of Ray calls `name`, None where this Ray does not have it."""
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        log.debug("this Ray does not have %s of %s", name, module)
        return None


def _replace(module: str, name: str, value: Callable[..., Any]) -> Callable[[], None] | None:
    """Replace a function of Ray; return what puts it back, None where this Ray does not have it."""
    before = _found(module, name)
    if before is None:
        return None
    path, _, last = name.rpartition(".")
    owner = _found(module, path) if path else importlib.import_module(module)
    setattr(owner, last, value)
    return functools.partial(setattr, owner, last, before)


def _nothing(*_: Any, **__: Any) -> None:
    pass


# --- a start without what nobody asks for --------------------------------------------------------


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Have Ray start what a private cluster needs and nothing else.

    Without the API server, the autoscaler and the monitor of logs, which nobody asks here, Ray
    starts and ends seconds sooner (results, "What a start takes"). With Ray's extra `default`
    the agent of the node would serve jobs, on a fixed port that a second private cluster could not
    have, and `include_dashboard` leaves out the page alone (node.py and services.py of Ray). Where
    nodes wait for files with their agents' ports, `idle_agent` writes them instead of agents.
    """

    def no_api_server(node: Any, *_: Any, **__: Any) -> None:
        node._webui_url = ""

    get_node: Any = _found("ray._private.services", "get_node")
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            ("ray._private.services", "get_node", functools.partial(_asked_often, get_node)),
            ("ray._private.utils", "get_dashboard_dependency_error", _no_dashboard),
            ("ray._private.node", "Node.start_api_server", no_api_server),
            ("ray._private.node", "Node.start_monitor", _nothing),
            ("ray._private.node", "Node.start_log_monitor", _nothing),
            ("ray._private.services", _COMMAND_OF_AGENT, _idle_agents()),
        ):
            if value is None:
                continue
            if undo := _replace(module, name, value):
                stack.callback(undo)
        yield


def _asked_often(get_node: Callable[[str, str], Any], gcs_address: str, node_id: str) -> Any:
    """Return what Ray knows of a node, RuntimeError where it does not know it within a second.

    Ray's get_node, which it calls until the raylet has registered, looks once a second.
    """
    make_state = _found("ray._private.state", "GlobalState")
    options = _found("ray._private.services", "_get_gcs_client_options")
    if make_state is None or options is None:
        return get_node(gcs_address, node_id)
    state: Any = make_state()
    state._initialize_global_state(options(gcs_address))
    until = time.monotonic() + 1.0
    while all(known["NodeID"] != node_id for known in state.node_table()):
        if time.monotonic() > until:
            raise RuntimeError(f"no node {node_id} yet")
        time.sleep(_NODE_LOOK_SECS)
    return get_node(gcs_address, node_id)


def _idle_agents() -> Callable[..., list[str]] | None:
    """Return what stands for the function that begins an agent's command; None: agents are Ray's.

    Port files are of the Rays that have `persist_port`; earlier ones wait for the agents.
    """
    command: Any = _found("ray._private.services", _COMMAND_OF_AGENT)
    names: dict[Any, list[Any]] = {
        _found("ray._private.ray_constants", process): [_found("ray._raylet", p) for p in ports]
        for process, ports in _AGENT_PORTS.items()
    }
    known = (_found("ray._raylet", "persist_port"), *names, *itertools.chain(*names.values()))
    if command is None or None in known:
        return None

    def idle(component: str, *given: Any, **named: Any) -> list[str]:
        if component not in names:
            return list(command(component, *given, **named))
        script = Path(__file__).with_name("idle_agent.py")
        return [sys.executable, "-S", "-E", str(script), ",".join(names[component])]

    return idle


def _no_dashboard(*_: Any, **__: Any) -> ImportError:
    return ImportError("a private cluster has none")


# --- the token of a cluster ----------------------------------------------------------------------


@functools.cache
def _first_token() -> tuple[str | None, ...]:
    return tuple(map(os.environ.get, _TOKEN_VARIABLES))


def forget_token() -> None:
    """Have Ray read the token of this cluster: it keeps what it read for an earlier one.

    Raises InfrastructureError where this Ray cannot be told to, and the earlier one was another.
    """
    first = _first_token()
    config = _found("ray._raylet", "Config.initialize")
    loader = _found("ray._raylet", "AuthenticationTokenLoader.instance")
    reset = getattr(loader(), "reset_cache", None) if loader else None
    if config is not None and reset is not None:
        config("")
        reset()
    elif first != tuple(map(os.environ.get, _TOKEN_VARIABLES)):
        raise InfrastructureError(
            "this version of Ray uses one token in a process, and a cluster with another one was "
            "used before; start another process for this cluster"
        )


# --- signals and stdout --------------------------------------------------------------------------


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Keep the handlers of SIGINT and SIGTERM; ray.init and ray.shutdown replace the latter.

    The first puts one there that exits with 15, the signal's number, and without a word: not for a
    moment, where this Ray has the function that does it. The second leaves the kernel's own, which
    ends the process, and Python does not know it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    undo = _replace("ray._private.utils", "set_sigterm_handler", _nothing)
    try:
        yield
    finally:
        if undo is not None:
            undo()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def messages_logged() -> Iterator[Callable[[], None]]:
    """Log, in the block, the raylet's messages: Ray prints them on stdout, which carries results.

    Ray has no switch for it. Yields what is to be called once Ray has started, which then tells
    Ray's threads from ours where this Ray does not have the function that prints.
    """
    if undo := _replace("ray._private.worker", "print_to_stdstream", _log_lines):
        with contextlib.ExitStack() as stack:
            stack.callback(undo)
            yield lambda: None
        return
    ours = set(threading.enumerate())
    threads: set[threading.Thread] = set()
    stdout: Any = _WithoutThreads(sys.stdout, threads)
    with contextlib.redirect_stdout(stdout):
        yield lambda: threads.update(set(threading.enumerate()) - ours)


def _log_lines(data: dict[str, Any], *_: Any, **__: Any) -> None:
    for line in data["lines"]:
        log.info("Ray: %s", line)


class _WithoutThreads:
    """A stdout that logs what some threads write."""

    def __init__(self, stdout: Any, threads: Set[threading.Thread]) -> None:
        self._stdout, self._threads = stdout, threads

    def write(self, text: str) -> int:
        if threading.current_thread() not in self._threads:
            return int(self._stdout.write(text))
        for line in filter(str.strip, text.splitlines()):
            log.info("Ray: %s", line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stdout, name)
