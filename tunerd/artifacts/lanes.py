"""Several requests in one launch, of several tenants or of one: arrays of the host with rows."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tunerd.artifacts.captured import Recorder, StagedModel
from tunerd.artifacts.manifest import SLOTS
from tunerd.artifacts.marked_graph import Copy
from tunerd.artifacts.parts import Nothing, Part, Written, go_in_parts
from tunerd.artifacts.pieces import Pieces
from tunerd.artifacts.staging import PinnedArrays, Writes, written
from tunerd.vocabulary import Arrays

Request = tuple[str, Mapping[str, Any]]  # a tenant, and its inputs by name


class StagedRows(StagedModel):
    """A StagedModel that takes requests of a row each, at most `count` a launch.

    Rows that are left over have what they had. Requests have a tenant each, which is nothing here.
    `launch` and `begin` raise ValueError for more requests than rows, or none.
    """

    _is_by_row = True

    def __init__(self, recorder: Recorder, *, is_ahead: bool = False) -> None:
        super().__init__(recorder, is_ahead=is_ahead)
        self.count = min(spec.shape[0] for spec in recorder.input_specs)
        self._filled = 0

    def goes_in_parts(self, given: Any) -> bool:
        """Say whether the inputs of all these requests are so large together."""
        return self.may_go_in_parts and go_in_parts(len(given) * self._request_bytes)

    def read(self) -> Any:
        """Return the outputs by name for each request of the last launch, the caller's."""
        return self._outputs.read(self._filled)

    @functools.cached_property
    def _request_bytes(self) -> int:
        return sum(self._inputs.places[name][1] for name in self._there) // self.count

    def _refuse_others(self, given: Sequence[Request]) -> None:
        if not 0 < len(given) <= self.count:
            raise ValueError(f"{len(given)} requests for {self.count} lanes")

    def _copies_of(self, inputs: Any, writes: Writes | None = None) -> list[Copy]:
        self._refuse_others(inputs)
        self._filled = len(inputs)
        rows = enumerate(inputs)
        return [copy for row, (_, of) in rows for copy in self._copies(row, of, writes)]

    def _copies(
        self, row: int, inputs: Mapping[str, Any], writes: Writes | None
    ) -> Iterator[tuple[int, int, int]]:
        for name, there in self._there.items():
            here, size = self._inputs.places[name]
            size //= self.count
            if isinstance(inputs, PinnedArrays):
                here, _ = inputs.places[name]
            else:
                into = self._inputs[name][row, ...]
                written(functools.partial(np.copyto, into, inputs[name], casting="no"), writes)
                here += row * size
            yield there + row * size, here, size


class StagedLanes(StagedRows):
    """Rows that are lanes: each takes a request of any tenant.

    What it launches is done before the tenants' weights go from the device: `is_done` or `wait`
    is to be asked until they say so. Where weights may lack, they are brought as large inputs are:
    `begin` has a thread do so, and nobody else waits for it.
    """

    def __init__(self, recorder: Recorder, pieces: Pieces, *, is_ahead: bool = False) -> None:
        super().__init__(recorder, is_ahead=is_ahead)
        self._pieces = pieces
        self._slots = self._inputs.pop(SLOTS)
        self._slots_there = self._there.pop(SLOTS)
        self._held: list[str] = []
        self._holding = threading.Lock()
        self._is_given_up = False
        self._small: Any = None  # requests that begin with nothing but their weights
        self._has_large_inputs = self.may_go_in_parts
        self.may_go_in_parts |= pieces.most is not None

    def launch(
        self,
        inputs: Any,
        stream: int,
        *,
        bring: int | None = None,
        fetch: int | None = None,
        leaves: bool = False,
    ) -> None:
        """Queue requests, on streams and with inputs as a StagedModel takes them.

        Lanes that are left over compute the first slot.
        A tenant whose weights are not on the device waits for their copy, and who calls with it.
        Raises ValueError for more requests than lanes, or none, KeyError for a tenant that there is
        not, RuntimeError where there is no room for its weights.
        """
        self._hold(inputs)
        try:
            super().launch(inputs, stream, bring=bring, fetch=fetch, leaves=leaves)
        except BaseException:
            self._let_go()
            raise

    def goes_in_parts(self, given: Any) -> bool:
        """Say whether the requests' inputs are so large, or a tenant's weights lack."""
        return self._are_large(given) or self._lacks_weights(given)

    def begin(self, given: Any, stream: int | None) -> list[Part | Written | Nothing]:
        """Return the parts of the requests' inputs, and before them what brings weights that lack.

        Raises what `launch` does; what brings weights raises it when it is asked whether it is
        done.
        """
        self._refuse_others(given)
        self._is_given_up, self._small = False, None
        bringing: list[Part | Written | Nothing] = []
        if self._lacks_weights(given):
            # The time of the launch begins when they are there.
            bringing, stream = [self._by_thread(functools.partial(self._bring, given))], None
        else:  # perhaps because one before it has brought them meanwhile
            self._hold(given)
        if not self._are_large(given):
            self._small = given
            return [*bringing, Nothing()]
        try:
            return [*bringing, *super().begin(given, stream)]
        except BaseException:
            self._let_go()
            raise

    def follow(self, stream: int, *, fetch: int | None = None, leaves: bool = False) -> None:
        """Queue the launch, when all of its parts are queued and its weights are there."""
        small, self._small = self._small, None
        if small is None:
            super().follow(stream, fetch=fetch, leaves=leaves)
        else:
            super().launch(small, stream, fetch=fetch, leaves=leaves)

    def give_up(self) -> None:
        """Have what was begun never launched: the tenants' weights may go from the device."""
        self._is_given_up = True
        self._let_go()

    def is_done(self) -> bool:
        """Say whether the last launch has ended; raises what the stream has met."""
        done = super().is_done()
        if done:
            self._let_go()
        return done

    def wait(self) -> None:
        """Wait until the last launch has ended."""
        super().wait()
        self._let_go()

    def _are_large(self, given: Any) -> bool:
        return self._has_large_inputs and super().goes_in_parts(given)

    def _lacks_weights(self, given: Sequence[Request]) -> bool:
        pieces = self._pieces
        return pieces.most is not None and not all(pieces.is_resident(name) for name, _ in given)

    def _bring(self, given: Sequence[Request]) -> None:
        """Hold, in a thread of this model; and let go where it was given up meanwhile."""
        self._hold(given)
        if self._is_given_up:
            self._let_go()

    def _hold(self, given: Sequence[Request]) -> None:
        """Have the weights of the requests' tenants on the device, and note their slots."""
        self._refuse_others(given)
        self._let_go()
        names = [tenant for tenant, _ in given]
        slots = self._pieces.hold(names)
        self._held = names
        self._slots[: len(slots)] = slots
        self._slots[len(slots) :] = slots[0]

    def _copies_of(self, inputs: Any, writes: Writes | None = None) -> list[Copy]:
        slots = (self._slots_there, *self._inputs.places[SLOTS])
        return [slots, *super()._copies_of(inputs, writes)]

    def _let_go(self) -> None:
        with self._holding:
            held, self._held = self._held, []
        self._pieces.release(held)


def fill(
    lanes: np.ndarray[Any, Any],
    into: Mapping[str, np.ndarray[Any, Any]],
    slots: Sequence[int],
    inputs: Sequence[Mapping[str, Any]],
) -> None:
    """Write slots, and the inputs of a request each; lanes that are left over compute the first.

    TypeError for an input of another type.
    """
    lanes[: len(slots)] = slots
    lanes[len(slots) :] = slots[0]
    for name, array in into.items():
        for row, given in enumerate(inputs):
            np.copyto(array[row, ...], given[name], casting="no")


def rows(outputs: Mapping[str, np.ndarray[Any, Any]], count: int) -> list[Arrays]:
    """Return copies of the outputs of so many lanes."""
    return [
        {name: array[lane, ...].copy() for name, array in outputs.items()} for lane in range(count)
    ]


def smallest(counts: Sequence[int], requests: int) -> int:
    """Return the smallest number of lanes that takes so many requests, or else the largest."""
    return next((count for count in counts if count >= requests), counts[-1])
