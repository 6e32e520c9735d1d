"""The weights of tenants on a device: a piece of memory each, for as many as a budget allows.

A tenant whose weights are not there is *cold*: it costs one copy into a piece, a new one or that of
the tenant that was not used for longest. Pieces that somebody holds stay as they are: what was
launched may still read them. No memory is given back: pieces are used again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping
from typing import Any, Protocol

from tunerd.vocabulary import SLOT_BYTES

_MOST_SLOTS = 2**31 - 1


class Memory(Protocol):
    """Where pieces lie."""

    def make(self) -> Any:
        """Return a new piece; raises whatever tells that there is no memory."""
        ...

    def address(self, piece: Any) -> int: ...

    def fill(self, piece: Any, data: Any) -> None:
        """Copy bytes of the host into a piece, and return when they are there."""
        ...


class Pieces:
    """Who has a piece. All of it may be called by several threads.

    first: the piece from which slots are counted. One tenant has it for ever.
    brought: how many tenants had their weights copied into a piece since then.
    """

    def __init__(
        self, memory: Memory, sources: MutableMapping[str, Any], own: str, most: int | None
    ) -> None:
        """Begin with the piece of the tenant `own`.

        sources: the bytes of each tenant in the host's memory; may grow, and `forget` takes out.
        most: pieces that there may be; None for no limit.
        """
        self._memory, self._sources, self._most = memory, sources, most
        self.brought = 0
        self.first = memory.make()
        memory.fill(self.first, sources[own])
        self._base = memory.address(self.first)
        self._slots = OrderedDict({own: 0})  # least recently used first
        self._pieces: dict[int, Any] = {0: self.first}  # by slot
        self._free: list[int] = []
        self._holds = {own: 1}
        self._lock = threading.Lock()  # for moments
        self._moving = threading.Lock()  # held while a piece is filled

    @property
    def resident(self) -> tuple[str, ...]:
        """The tenants that have a piece, the least recently used first."""
        with self._lock:
            return tuple(self._slots)

    @property
    def most(self) -> int | None:
        """How many pieces there may be; None for no limit."""
        return self._most

    def limit(self, most: int) -> None:
        """Have no more pieces than these made from now on; those that there are stay."""
        self._most = most

    def is_resident(self, name: str) -> bool:
        return name in self._slots

    def hold(self, names: Iterable[str]) -> list[int]:
        """Have pieces of tenants on the device, where they stay until `release`; return slots.

        Names may come twice. Raises KeyError for a tenant without weights, RuntimeError where all
        pieces are held.
        """
        held: list[str] = []
        slots = []
        try:
            for name in names:
                slots.append(self._hold(name))
                held.append(name)
        except BaseException:
            self.release(held)
            raise
        return slots

    def release(self, names: Iterable[str]) -> None:
        """Undo a `hold` of the same names."""
        with self._lock:
            for name in names:
                self._holds[name] -= 1
                if not self._holds[name]:
                    del self._holds[name]

    def forget(self, name: str) -> None:
        """Have a tenant's weights no more, here or on the device; RuntimeError where it is held.

        Both at one moment: who brought it meanwhile would leave its weights to the next one of its
        name.
        """
        with self._moving, self._lock:
            if name in self._holds:
                raise RuntimeError(f"tenant '{name}' is in use")
            if name in self._slots:
                self._free.append(self._slots.pop(name))
            del self._sources[name]

    def copied(self, name: str) -> tuple[int, Any]:
        """Return the slot of one more piece with a tenant's weights, and the caller's piece."""
        with self._moving:
            slot, piece = self._made()
        self._memory.fill(piece, self._sources[name])
        return slot, piece

    def _hold(self, name: str) -> int:
        slot = self._held(name)
        if slot is not None:
            return slot
        with self._moving:
            source = self._sources[name]
            slot = self._held(name)  # whom another thread has brought meanwhile
            if slot is not None:
                return slot
            slot = self._room()
            try:
                self._memory.fill(self._pieces[slot], source)
            except BaseException:
                self._free.append(slot)
                raise
            with self._lock:
                self._slots[name] = slot
                self._holds[name] = 1
                self.brought += 1
            return slot

    def _held(self, name: str) -> int | None:
        """Hold a tenant that has a piece, and return its slot."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is not None:
                self._slots.move_to_end(name)
                self._holds[name] = self._holds.get(name, 0) + 1
            return slot

    def _room(self) -> int:
        """Return the slot of a piece that nobody has."""
        if self._free:
            return self._free.pop()
        if self._most is None or len(self._pieces) < self._most:
            slot, piece = self._made()
            self._pieces[slot] = piece
            return slot
        with self._lock:
            for name in self._slots:
                if name not in self._holds:
                    return self._slots.pop(name)
        raise RuntimeError(
            f"all {self._most} pieces for tenants are in use; give more memory, or serve fewer of "
            "them at a time"
        )

    def _made(self) -> tuple[int, Any]:
        piece = self._memory.make()
        slot, rest = divmod(self._memory.address(piece) - self._base, SLOT_BYTES)
        if rest or abs(slot) > _MOST_SLOTS:
            raise RuntimeError("the device gave memory where kernels cannot reach it")
        return slot, piece
