"""A graph between events: what it takes from the host and leaves there, and when it has ended."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

from tunerd.system.cuda_driver import NO_TIMES, ShortCalls, checked

# To an address, from one, so many bytes; one of them is on the device.
Copy = tuple[int, int, int]


class Maker(Protocol):
    """What makes graphs on a stream: a Recorder."""

    driver: Any

    @property
    def short(self) -> ShortCalls: ...
    def entered(self) -> contextlib.AbstractContextManager[None]: ...


class MarkedGraph:
    """A graph that says when its last launch has ended, and how long that took.

    keeps: what it reads and writes. Raises RuntimeError with CUDA's name for an error.
    """

    def __init__(self, maker: Maker, executable: Any, keeps: Any = ()) -> None:
        """Take a graph that is ready; its events are of the context of its stream.

        The one for what is brought is of the thread's, as that stream is.
        """
        driver = self._driver = maker.driver
        self._executable, self._keeps, self._short = executable, keeps, maker.short
        with maker.entered():
            made = [checked(driver.cuEventCreate(flags)) for flags in (0, 0, NO_TIMES)]
        self._events = [*made, checked(driver.cuEventCreate(NO_TIMES))]
        self._graph = int(executable)
        self._begin, self._end, self._fetched, self._brought = map(int, self._events)
        self._last = self._end

    def begin(self, stream: int) -> None:
        """Have the time of the next launch begin when the stream is here."""
        self._short.record(self._begin, stream)

    def launch(
        self,
        stream: int,
        copies: Sequence[Copy] = (),
        *,
        bring: int | None = None,
        fetch: int | None = None,
        back: Sequence[Copy] = (),
        has_begun: bool = False,
    ) -> None:
        """Queue copies to the device, the graph, and copies to the host.

        Args:
            stream: of the context of the graph.
            bring: a stream of this device on which nothing waits, for the copies before it.
            fetch: one for those after it, of which the next graph need not wait for the end.
            has_begun: its time has, by `begin`; with copies on its own stream.
        """
        short = self._short
        if bring is None:
            if not has_begun:
                short.record(self._begin, stream)
            self._bring(copies, stream)
        else:
            self._bring(copies, bring)
            short.record(self._brought, bring)
            short.wait(stream, self._brought)
            short.record(self._begin, stream)
        short.launch(self._graph, stream)
        short.record(self._end, stream)
        self._last = self._end
        if back:
            if fetch is None:
                fetch = stream
            else:
                short.wait(fetch, self._end)
            for here, there, size in back:
                short.copy_to_host(here, there, size, fetch)
            self._last = self._fetched
            short.record(self._last, fetch)

    def _bring(self, copies: Sequence[Copy], stream: int) -> None:
        for there, here, size in copies:
            self._short.copy_to_device(there, here, size, stream)

    def is_done(self) -> bool:
        """Say whether the last launch has ended; raises what the stream has met."""
        return self._short.has_ended(self._last)

    def wait(self) -> None:
        """Wait until the last launch has ended."""
        checked(self._driver.cuEventSynchronize(self._last))

    def secs(self) -> float:
        """Return how long the last launch had its stream, by the GPU's clock.

        Copies are in it that were on this stream, too.
        """
        return self._short.elapsed_ms(self._begin, self._end) / 1e3

    def __del__(self) -> None:
        # Of a context that is gone, all is gone: what these answer does not matter.
        if executable := getattr(self, "_executable", None):
            self._driver.cuGraphExecDestroy(executable)
        for event in getattr(self, "_events", ()):
            self._driver.cuEventDestroy(event)
