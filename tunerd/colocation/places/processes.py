"""Members in runner processes, one for each seat, as slices have them.

What ends one process leaves the others alone, and what exceeds its time can be ended with it.
Inputs and outputs lie in memory that both sides have, and some bytes over a socket wake either.

No thread belongs to a seat. Who sends a request writes its inputs where the process reads them, if
there is a slot; what was lent for inputs the process maps itself. Who decides, as a rule the
dispatcher's thread, asks the process as soon as a request is started, sleeps by a bell that all
connections ring, and takes what they say when it polls: between an answer and the next request no
other thread has to wake. A seat of a whole model has a second request while it runs the first, so
that it does not wait for that either; a lane's line keeps the order. What would keep the dispatcher
from others is done elsewhere: large inputs and outputs are copied in a few threads, and why a
process was lost is found out, which may take long, in a thread of that loss. What these find is
told when the place is polled next: they ring for that.

A process that has ended while nobody waited for it is lost when it is asked next. Of those that
have a device in common, a fault may take more than one: who is seen to be gone is lost, and the
fault is a member's own where nothing else ran meanwhile, or its slice says so. What a lost process
was asked for stays in its line until that is known. What an evicted one runs leaves it at once, and
what ends the process may take a while, and is done when it is loaded again.
"""

from __future__ import annotations

import functools
import queue
import signal
import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from tunerd.artifacts.segments import Cut
from tunerd.colocation import artifacts
from tunerd.colocation.places import cpu_cut
from tunerd.colocation.places.base import (
    PROCESS_DEPTH,
    Done,
    Fault,
    Loaded,
    Place,
    Told,
    seat_bytes,
)
from tunerd.colocation.places.bell import Bell
from tunerd.colocation.places.lent import Lender
from tunerd.colocation.places.lines import Line
from tunerd.colocation.places.process_seat import Held, ProcessSeat, Run
from tunerd.colocation.plan import Member, PlaceKind, Proof
from tunerd.colocation.work import Lane, Seat
from tunerd.runner.client import ModelRunError
from tunerd.runner.seat_service import FAILED, PAUSED
from tunerd.slices.base import ProcessSlice
from tunerd.slices.cpu import CpuSlice
from tunerd.system import cores
from tunerd.system.text import numbers_text
from tunerd.vocabulary import Arrays, Kind, SliceSpec, TensorSpec

_LARGE_BYTES = 1 << 20  # to copy that takes some 100 us, about as long as to change threads
_COPIERS = 4


class RunnersPlace(Place):
    """Seats in processes; members say how a device is cut, and what makes a process of a lane."""

    kind: ClassVar[PlaceKind]
    depth: ClassVar[int] = PROCESS_DEPTH
    loaders: ClassVar[int] = 16  # a fault takes all, and a start waits for much besides cores
    bell: Bell

    def __init__(self) -> None:
        self.bell = Bell()
        self._seats: dict[Seat, ProcessSeat] = {}
        self._only: dict[str, ProcessSeat] = {}  # of members that have one seat
        self._found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for `poll`
        self._lock = threading.Lock()  # held while what follows, or what a seat runs, changes
        self._lines: defaultdict[str, Line[Run]] = defaultdict(Line)  # by lane
        self._busy: set[ProcessSeat] = set()
        self._lender = Lender()
        self._copiers: ThreadPoolExecutor | None = None
        self._is_closed = False

    @abstractmethod
    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        """Return what a process for a seat is started by."""

    def needed_bytes(self, member: Member, seats: int, *, cut: Cut | None) -> int:
        needed = artifacts.needed_memory(member.artifact)
        device = "cpu" if self.gpu_uuid is None else "cuda"
        each_bytes = seat_bytes(needed, self.kind, device, is_whole=cut is None)
        return seats * (needed.shared_bytes + each_bytes)

    def load(self, member: Member, lane: Lane, *, cut: Cut | None) -> Loaded:
        seat = Seat(member.name, lane.name)
        made = ProcessSeat(member, lane, self._slice_of(seat, lane), cut)
        proved, found = made.load()
        self._seats[seat] = made
        if all(other == seat for other in self._seats if other.member == member.name):
            self._only[member.name] = made
        else:
            self._only.pop(member.name, None)
        with self._lock:
            self.bell.watch(made.descriptor, functools.partial(self._hear, made))
        proof = Proof(
            lane=lane.name,
            device=proved.device,
            units=proved.sm_count,
            mechanism=proved.mechanism,
            which=numbers_text(lane.cores),
        )
        return Loaded(found.secs, proof, ends=found.ends)

    def lent(self, specs: Sequence[TensorSpec]) -> Arrays:
        return self._lender.lent(specs)

    def holding(self, member: str, inputs: Arrays) -> Arrays:
        held = self._only.get(member)
        return inputs if held is None else held.lend(inputs)

    def give_back(self, member: str, inputs: Arrays) -> None:
        if isinstance(inputs, Held):
            inputs.seat.take_back(inputs.slot)

    # --- by who decides --------------------------------------------------------------------------

    def start(self, seat: Seat, segment: int, inputs: Arrays, told: Told) -> None:
        held = self._seats[seat]
        run = held.run_of(segment, inputs, told)
        is_large = not run.is_ready and held.input_bytes > _LARGE_BYTES
        if not run.is_ready and not is_large:
            held.write(run, inputs)
        with self._lock:
            line = self._lines[seat.lane]
            line.add(run)
            if is_large:
                self._copied(self._bring, run, inputs)
            self._go_on(line)
            while self._lender.gone:
                number = self._lender.gone.popleft()
                for each in self._seats.values():
                    each.forget(number)

    def pause(self, seat: Seat) -> None:
        self._seats[seat].client.ask_to_pause(True)

    def poll(self) -> float | None:
        with self._lock:
            self.bell.hear()
            while self._found.qsize():
                self._found.get_nowait()()
        return None

    def evict(self, seat: Seat) -> tuple[Seat, ...]:
        held = self._seats[seat]
        held.is_evicted = True
        held.client.give_up()
        self._forget(held)
        return (seat,)

    # --- while it polls or starts ----------------------------------------------------------------

    def _go_on(self, line: Line[Run]) -> None:
        """Ask for what may be asked for."""
        for run in line.next():
            held = run.held
            if held.is_lost:  # why is being found out
                return
            if not held.asked:
                self._begin(held)
            held.ask(run)
            if held.ended is not None:
                self._lose(held)

    def _begin(self, held: ProcessSeat) -> None:
        """Note who runs at the same time as whom."""
        held.has_company = False
        self._busy.add(held)
        if len(self._busy) > 1:
            for each in self._busy:
                each.has_company = True

    def _hear(self, held: ProcessSeat) -> None:
        """Take what a process says of the first of what it was asked for."""
        try:
            said = held.client.hear()
        except OSError as error:
            self.bell.unwatch(held.descriptor)
            held.ended = error.with_traceback(None)  # whose frames have requests
            if held.asked:
                self._lose(held)
            return
        if said is None:
            return
        if said.what == FAILED:
            self._lose(held)
            return
        run = held.asked.popleft()
        secs = max(0.0, said.at - max(run.asked_at, held.free_at))
        held.free_at = said.at
        if not held.asked:
            self._busy.discard(held)
        line = self._lines[held.lane.name]
        line.leave(run)
        self._go_on(line)
        if said.what == PAUSED:
            held.keep(run)
            run.told(Done(secs, None, said.segment - run.segment))
        elif held.output_bytes > _LARGE_BYTES:
            self._copied(self._fetch, run, secs)
        else:
            self._done(run, secs, held.outputs(run))

    def _done(self, run: Run, secs: float, outputs: Arrays) -> None:
        if not run.held.is_left:
            run.held.free(run)
            run.told(Done(secs, outputs, run.held.segments - run.segment))

    # --- what is done elsewhere, and told here ---------------------------------------------------

    def _soon(self, call: Callable[[], None]) -> None:
        """Have something called when the place is polled, and have it be polled."""
        with self._lock:
            if not self._is_closed:
                self._found.put(call)
                self.bell.ring()

    def _copied(self, copy: Callable[..., Callable[[], None]], run: Run, *given: object) -> None:
        """Copy what is large, and have what that returns be called."""

        def work() -> None:
            try:
                then = copy(run, *given)
            except Exception as error:
                then = functools.partial(self._not_copied, run, error)
            self._soon(then)

        if self._copiers is None:
            self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="tunerd-copies")
        self._copiers.submit(work)

    def _bring(self, run: Run, inputs: Arrays) -> Callable[[], None]:
        run.held.write(run, inputs)
        return lambda: self._go_on(self._lines[run.held.lane.name])

    def _fetch(self, run: Run, secs: float) -> Callable[[], None]:
        return functools.partial(self._done, run, secs, run.held.outputs(run))

    def _not_copied(self, run: Run, error: Exception) -> None:
        held = run.held
        if not held.is_left:
            run.told(Fault(f"{type(error).__name__}: {error}", (_seat_of(held),)))

    def _lose(self, held: ProcessSeat) -> None:
        """Find out what has become of a process, which nobody asks or hears any more."""
        self.bell.unwatch(held.descriptor)
        held.is_lost = True
        held.finding = threading.Thread(
            target=self._find,
            args=(held,),
            name=f"{held.member.name}@{held.lane.name}",
            daemon=True,
        )
        held.finding.start()

    def _find(self, held: ProcessSeat) -> None:
        try:
            error: BaseException = held.client.failure(held.ended)
        except BaseException as raised:  # else nobody would hear of it
            error = raised
        self._soon(functools.partial(self._lost, held, self._fault(_seat_of(held), error)))

    def _lost(self, held: ProcessSeat, fault: Fault) -> None:
        if held.is_left:
            return
        held.asked.clear()
        self._busy.discard(held)
        line = self._lines[held.lane.name]
        for nth, run in enumerate(line.leave_seat(held)):
            run.told(Fault("its process has faulted before it ran", fault.lost) if nth else fault)
        self._go_on(line)

    def _fault(self, seat: Seat, error: BaseException) -> Fault:
        lost = (seat, *(s for s, held in self._seats.items() if s != seat and held.client.is_lost))
        if isinstance(error, ModelRunError):
            is_own = error.failure.kind is not Kind.COLLATERAL
            return Fault(error.failure.message, lost, is_own=is_own)
        return Fault(f"{type(error).__name__}: {error}", lost)

    def _forget(self, held: ProcessSeat) -> None:
        """Have nobody wait for what a seat runs."""
        with self._lock:
            held.is_left = True
            self.bell.unwatch(held.descriptor)
            self._busy.discard(held)
            line = self._lines[held.lane.name]
            line.leave_seat(held)
            self._go_on(line)

    # --- its life --------------------------------------------------------------------------------

    def reload(self, seat: Seat) -> Loaded:
        old = self._seats[seat]
        self._forget(old)
        old.close()
        return self.load(old.member, old.lane, cut=old.cut)

    def close(self) -> None:
        seats, self._seats = self._seats, {}
        self._only.clear()
        for held in seats.values():
            self._forget(held)
        if seats:  # each takes a while to end by itself
            with ThreadPoolExecutor(len(seats)) as pool:
                list(pool.map(ProcessSeat.close, seats.values()))
        with self._lock:
            self._is_closed = True
            copiers, self._copiers = self._copiers, None
        if copiers is not None:
            copiers.shutdown(cancel_futures=True)
        self.bell.close()
        self._lender.close()


def _seat_of(held: ProcessSeat) -> Seat:
    return Seat(held.member.name, held.lane.name)


class ProcessesPlace(RunnersPlace):
    """Processes on cores of this machine."""

    kind: ClassVar[PlaceKind] = "processes"

    def cut(self, lanes: Sequence[Lane]) -> tuple[Lane, ...]:
        return cpu_cut.cut(lanes)

    def capacity_bytes(self) -> int:
        return cores.memory_bytes()

    def memory_bytes(self) -> Mapping[Seat, int]:
        import psutil

        found = {}
        for seat, held in self._seats.items():
            try:
                found[seat] = int(psutil.Process(held.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, member: str) -> None:
        held = [held for seat, held in list(self._seats.items()) if seat.member == member]
        for process in [each.process for each in held]:  # by pid it may be another one by now
            if process is not None:
                process.signal(signal.SIGKILL)

    def _slice_of(self, seat: Seat, lane: Lane) -> ProcessSlice:
        return CpuSlice(
            SliceSpec(
                slice_id=f"{seat.member}@{seat.lane}",
                kind="cpu",
                pct=lane.pct,
                cores=lane.cores,
                environment=(("OMP_NUM_THREADS", str(len(lane.cores))),),
            )
        )
