"""A check that accesses to memory by streams and by the host are ordered, whatever the
timing.

Work is done at once, in the order in which the host issues it. A vector clock for each
stream and for the host tells what is known to be done before what: work on a stream
comes after what the host knew when it issued it, after earlier work on the stream, and
after the events that the stream waits for; the host knows what it has waited for. Two
accesses to the same bytes, one of which writes, race if neither comes before the
other."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

HOST = "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """An access to some bytes, by a stream or the host at its own time."""

    what: str
    begin: int
    end: int
    writes: bool
    actor: str
    time: int


class Order:
    """Vector clocks of the host and of streams, and the last accesses to memory.

    The threads of the host count as one: what one has waited for, all know. Tests delay
    them at random, so that an order by chance is not there in all runs.

    Attributes:
        races: What was found, in words.
    """

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {}
        self._accesses: list[Access] = []
        self._lock = threading.RLock()

    def clock(self, actor: str) -> Clock:
        """Return what is before the next work of a stream, or of the host."""
        with self._lock:
            return dict(self._clocks.get(actor, {}))

    def reached(self, stream: str) -> Clock:
        """Return what is before an event that the host records on a stream now."""
        with self._lock:
            return dict(self._joined(stream, self._clocks.get(HOST, {})))

    def issue(self, stream: str) -> Clock:
        """Count work that the host issues to a stream. Return its clock."""
        with self._lock:
            clock = self._joined(stream, self._clocks.get(HOST, {}))
            clock[stream] = clock.get(stream, 0) + 1
            return dict(clock)

    def wait(self, actor: str, clock: Clock) -> None:
        """Let the host, or a stream, wait for what has a clock."""
        with self._lock:
            self._joined(actor, clock)

    def knows(self, actor: str, clock: Clock) -> bool:
        """Return whether what has a clock comes before the next work of a stream, or of
        the host."""
        with self._lock:
            own, host = self._clocks.get(actor, {}), self._clocks.get(HOST, {})
            return all(
                max(own.get(key, 0), host.get(key, 0)) >= time
                for key, time in clock.items()
            )

    def access(
        self,
        what: str,
        actor: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
    ) -> None:
        """Record work that reads and writes memory. Races are added to `races`."""
        with self._lock:
            if actor == HOST:
                clock = self._clocks.setdefault(HOST, {})
                clock[HOST] = clock.get(HOST, 0) + 1
            else:
                clock = self.issue(actor)
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._add(
                        what,
                        tensor.data_ptr(),
                        tensor.data_ptr() + tensor.nbytes,
                        is_write,
                        actor,
                        clock,
                    )

    def access_range(self, what: str, actor: str, begin: int, nbytes: int) -> None:
        """Record a write to memory that is given by its address, as the next owner of
        freed memory would do it."""
        with self._lock:
            clock = (
                self.issue(actor)
                if actor != HOST
                else self._clocks.setdefault(HOST, {})
            )
            if actor == HOST:
                clock[HOST] = clock.get(HOST, 0) + 1
            self._add(what, begin, begin + nbytes, True, actor, clock)

    def _joined(self, actor: str, clock: Clock) -> Clock:
        own = self._clocks.setdefault(actor, {})
        for key, time in clock.items():
            own[key] = max(own.get(key, 0), time)
        return own

    def _add(
        self, what: str, begin: int, end: int, writes: bool, actor: str, clock: Clock
    ) -> None:
        if begin == end:
            return
        kept = []
        for other in self._accesses:
            if other.end <= begin or end <= other.begin:
                kept.append(other)
                continue
            is_before = clock.get(other.actor, 0) >= other.time
            if not is_before and (writes or other.writes):
                self.races.append(
                    f"{what} on {actor} races with {other.what} on {other.actor}"
                )
            if not (is_before and writes and begin <= other.begin and other.end <= end):
                kept.append(other)
        kept.append(Access(what, begin, end, writes, actor, clock.get(actor, 0)))
        self._accesses = kept
