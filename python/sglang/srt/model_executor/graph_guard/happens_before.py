"""Finds races in a trace of stream operations: pairs that touch the same bytes with no ordering between them.

The engine is plain Python over numbers, so every rule can be tested without a device. ``race_detector`` feeds it from a
running program. Each thread of execution (a stream, or a stream's part in one capture) has a vector clock. An operation
advances the clock of its thread. An event stores the clock of the stream that recorded it. A wait merges the event's
clock into the clock of the waiting stream.

Two accesses race if they overlap, at least one of them writes, and neither happens before the other. This one rule
covers memory that the allocator reused too early (the accesses belong to two allocations) and memory that two streams
share (they belong to one allocation). Only accesses count. An allocation by itself is never reported.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

REUSE = "allocation-reuse"
LIVE = "live-conflict"
DROPPED_WAIT = "dropped-wait"

_LARGE = 64 << 20  # bytes; there are few longer accesses, so they are searched linearly


@dataclass(frozen=True)
class Region:
    """The bytes that an operation touches.

    A dense region (``pitch`` 0) is the range of ``nbytes`` bytes from ``start``. A pitched region touches only the
    first ``width`` of every ``pitch`` bytes in that range. Two column blocks of one matrix are therefore disjoint,
    although their ranges interleave.
    """

    start: int
    nbytes: int
    pitch: int = 0
    width: int = 0

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def overlaps(self, other: Region) -> bool:
        if self.start >= other.end or other.start >= self.end:
            return False
        if self.pitch and self.pitch == other.pitch:
            offset = (other.start - self.start) % self.pitch
            return offset < self.width or offset + other.width > self.pitch
        return True

    def covers(self, other: Region) -> bool:
        return not self.pitch and self.start <= other.start and other.end <= self.end


@dataclass(frozen=True)
class Operation:
    """One operation of the trace. ``info`` holds what the recorder knows about it: layer, operands, Python stack."""

    index: int
    name: str
    stream: Hashable
    info: dict = field(default_factory=dict, compare=False, hash=False)


@dataclass(frozen=True)
class Race:
    """Two operations with no ordering between them.

    Args:
        kind: REUSE, LIVE or DROPPED_WAIT.
        region: the bytes that the second operation touches. None for a dropped wait.
        allocations: (bytes, allocating stream) of the block of each operation. None if the block was allocated before
            the trace began.
    """

    kind: str
    first: Operation
    second: Operation
    region: Region | None = None
    first_writes: bool | None = None
    second_writes: bool | None = None
    allocations: tuple = (None, None)


@dataclass
class _Access:
    region: Region
    thread: tuple
    tick: int
    writes: bool
    operation: Operation
    block: _Block | None


@dataclass
class _Block:
    start: int
    nbytes: int
    stream: Hashable


_Key = (
    _Access | tuple[int, int, _Access]
)  # an access in HappensBefore._large, or an entry of HappensBefore._small


class HappensBefore:
    """Takes a trace event by event and collects its ``races``. Streams and events are any hashable ids.

    An operation is reported at most once per thread of execution that it races with.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.operations = 0
        self._clocks: dict[tuple, dict[tuple, int]] = {}
        self._host: dict[tuple, int] = {}
        self._events: dict[Hashable, tuple[dict[tuple, int], int | None]] = {}
        self._last: dict[tuple, Operation] = {}
        self._capture: int | None = None
        self._captures = 0
        self._capture_stream: Hashable = None
        self._members: set[Hashable] = set()
        self._blocks: dict[int, _Block] = {}
        self._block_starts: list[int] = []
        self._small: list[tuple[int, int, _Access]] = []  # (start, serial, access), sorted
        self._large: list[_Access] = []
        self._longest = 0
        self._serial = 0

    @property
    def streams(self) -> set[Hashable]:
        """The streams that ran operations."""
        return {stream for stream, _ in self._last}

    # -- memory ------------------------------------------------------------------------------------------------------

    def alloc(self, start: int, nbytes: int, stream: Hashable) -> None:
        """The allocator handed out ``nbytes`` bytes at ``start`` on ``stream``."""
        if start not in self._blocks:
            insort(self._block_starts, start)
        self._blocks[start] = _Block(start, nbytes, stream)

    def resize(self, start: int, nbytes: int) -> None:
        """Set the size of the block at ``start``, for recorders that learn it only after the allocation."""
        if (block := self._blocks.get(start)) is not None:
            block.nbytes = max(block.nbytes, nbytes)

    def free(self, start: int) -> None:
        """The last reference to the block at ``start`` was dropped. Work on it may still be queued."""
        if self._blocks.pop(start, None) is not None:
            del self._block_starts[bisect_left(self._block_starts, start)]

    def allocated(self, start: int) -> bool:
        """Whether the trace contains the allocation of a live block at ``start``."""
        return start in self._blocks

    def _block_of(self, address: int) -> _Block | None:
        at = bisect_right(self._block_starts, address) - 1
        if at < 0:
            return None
        block = self._blocks[self._block_starts[at]]
        return block if address < block.start + block.nbytes else None

    # -- order -------------------------------------------------------------------------------------------------------

    def record(self, event: Hashable, stream: Hashable) -> None:
        """``stream`` recorded ``event``. This replaces an earlier record of the event."""
        thread = self._thread(stream)
        self._events[event] = (dict(self._clock(thread)), thread[1])

    def wait(self, event: Hashable, stream: Hashable) -> None:
        """``stream`` waits for the last record of ``event``. Without a record the wait has no effect."""
        if event not in self._events:
            return
        clock, capture = self._events[event]
        if capture is not None and capture == self._capture:
            self._members.add(stream)
        _join(self._clock(self._thread(stream)), clock)

    def synchronize(self, stream: Hashable = None, event: Hashable = None) -> None:
        """The host waited for ``event``, for ``stream``, or, if both are None, for the whole device."""
        if event is not None:
            _join(self._host, self._events.get(event, ({}, None))[0])
        elif stream is not None:
            _join(self._host, self._clock(self._thread(stream)))
        else:
            for clock in list(self._clocks.values()):
                _join(self._host, clock)
            self._small.clear()  # everything so far is ordered before everything that follows
            self._large.clear()
            self._longest = 0

    def capture_begin(self, stream: Hashable) -> None:
        """A capture opens on ``stream``. Another stream joins it by waiting for one of its events.

        The captured work of a side stream is a separate thread. It is ordered by the launch of the graph on
        ``stream``, not after the earlier work of the same side stream.
        """
        before = dict(self._clock((stream, None)))
        self._captures += 1
        self._capture = self._captures
        self._capture_stream = stream
        self._members = {stream}
        _join(self._clock((stream, self._capture)), before)

    def capture_follows(self, stream: Hashable) -> None:
        """The graph under capture will be launched after what ``stream`` has queued outside the capture so far."""
        before = self._clock((stream, None))
        for member in self._members:
            _join(self._clock((member, self._capture)), before)

    def capture_end(self) -> None:
        """The capture closes. Its replay counts as one piece of work on the stream that it was captured on."""
        if self._capture is None:
            return
        done = self._clock((self._capture_stream, self._capture))
        _join(self._clock((self._capture_stream, None)), done)
        self._capture = None
        self._members = set()

    def wait_dropped(
        self, stream: Hashable, source: Hashable, name: str = "wait_stream", info: dict | None = None
    ) -> None:
        """``stream`` tried to wait for ``source``, without effect. This is a race if ``source`` has unordered work."""
        thread, pending = self._thread(stream), self._thread(source)
        last = self._last.get(pending)
        if last is None or self._clock(thread).get(pending, 0) >= self._clock(pending).get(pending, 0):
            return
        self.races.append(Race(DROPPED_WAIT, last, Operation(self.operations, name, stream, info or {})))

    # -- operations --------------------------------------------------------------------------------------------------

    def op(
        self,
        stream: Hashable,
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        name: str = "op",
        info: dict | None = None,
    ) -> Operation:
        """``stream`` queued an operation that touches these regions. Appends the races it is part of to ``races``."""
        thread = self._thread(stream)
        clock = self._clock(thread)
        _join(clock, self._host)
        tick = clock[thread] = clock.get(thread, 0) + 1
        operation = Operation(self.operations, name, stream, info or {})
        self.operations += 1
        self._last[thread] = operation
        accesses = [
            _Access(region, thread, tick, w, operation, self._block_of(region.start))
            for w, regions in ((True, writes), (False, reads))
            for region in regions
            if region.nbytes > 0
        ]
        reported: set[tuple] = set()
        for access in accesses:
            done: list[_Key] = []
            for key, earlier in self._near(access.region):
                if earlier.operation is operation:
                    continue
                ordered = clock.get(earlier.thread, 0) >= earlier.tick
                if ordered:
                    same = earlier.thread == thread and not earlier.writes
                    if (access.writes or same) and access.region.covers(earlier.region):
                        done.append(key)
                elif (access.writes or earlier.writes) and access.region.overlaps(earlier.region):
                    if earlier.thread not in reported:
                        reported.add(earlier.thread)
                        self._report(earlier, access)
            self._forget(done)
            self._keep(access)
        return operation

    def _report(self, first: _Access, second: _Access) -> None:
        blocks = (first.block, second.block)
        self.races.append(
            Race(
                LIVE if first.block is second.block else REUSE,
                first.operation,
                second.operation,
                second.region,
                first.writes,
                second.writes,
                tuple(b and (b.nbytes, b.stream) for b in blocks),
            )
        )

    # An access is forgotten once a later, ordered access covers it. Whatever races with the forgotten access also races
    # with the covering one, so no racing operation is missed, and the state stays proportional to the memory in use.
    def _near(self, region: Region) -> list[tuple[_Key, _Access]]:
        low = bisect_left(self._small, region.start - self._longest, key=lambda e: e[0])
        found: list[tuple[_Key, _Access]] = []
        for at in range(low, len(self._small)):
            entry = self._small[at]
            if entry[0] >= region.end:
                break
            if entry[2].region.end > region.start:
                found.append((entry, entry[2]))
        found += ((a, a) for a in self._large if a.region.start < region.end and region.start < a.region.end)
        return found

    def _keep(self, access: _Access) -> None:
        if access.region.nbytes > _LARGE:
            self._large.append(access)
            return
        self._serial += 1
        self._longest = max(self._longest, access.region.nbytes)
        insort(self._small, (access.region.start, self._serial, access), key=lambda e: e[:2])

    def _forget(self, keys: list[_Key]) -> None:
        for key in keys:
            if isinstance(key, _Access):
                self._large = [a for a in self._large if a is not key]
            else:
                del self._small[bisect_left(self._small, key[:2], key=lambda e: e[:2])]  # by (start, serial)

    def _thread(self, stream: Hashable) -> tuple:
        return (stream, self._capture if stream in self._members else None)

    def _clock(self, thread: tuple) -> dict[tuple, int]:
        if thread not in self._clocks:
            self._clocks[thread] = {}
        return self._clocks[thread]


def _join(clock: dict, other: dict) -> None:
    for thread, tick in other.items():
        if clock.get(thread, 0) < tick:
            clock[thread] = tick
