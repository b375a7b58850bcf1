"""Keeps the figures of the last ended iterations for `ebbtide.metrics`.

A job asks for them; they are from the records that the agent writes.
"""

from __future__ import annotations

import _thread
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ebbtide.profiler.agent.iteration_rule import UPDATED
from ebbtide.profiler.agent.spool import (
    GPU_TIMES,
    ITERATION,
    MEMORY,
    ON_DEVICE,
    PHASE,
    PHASES,
    RECORD,
    START,
)

# The device may lag some iterations behind the host, and the samples of the link a
# second.
_ITERATIONS = 128
# Phases without an end of an iteration: a job whose optimizer is not seen.
_MAX_PHASES = 8192
_MAX_SPANS = 8192
# Records that are kept for a job that has not asked yet.
_MAX_UNREAD_BYTES = 1 << 19


class _Phase(NamedTuple):
    """A finished phase."""

    phase: int
    sequence: int
    start_ns: int
    end_ns: int
    on_device: bool  # Whether its device times follow.
    memory_read: bool  # Whether memory was read at its end.


class _Iteration(NamedTuple):
    """A finished iteration."""

    number: int
    # Start of the first iteration that was recorded, where that is before its first
    # phase; else 0.
    begin_ns: int
    follows: bool  # Whether another iteration ended before it.
    phases: tuple[_Phase, ...]
    # The largest readings in bytes, by pool and device.
    peaks: dict[tuple[int, int], int]


class IterationTimes(NamedTuple):
    """Times of an iteration in ns of CLOCK_MONOTONIC, on the device's clock where it
    ran there, else on the host's."""

    number: int
    # End of the iteration before; start of the first phase where there is none.
    start_ns: int
    end_ns: int
    phase_ns: tuple[int, ...]  # Sum of each phase, in the order of `spool.PHASES`.


class IterationFigures:
    """Takes records as they are written, and sums them up only when a job asks."""

    def __init__(self) -> None:
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        # A signal handler may ask, on the thread that just asks.
        self._lock = _thread.RLock()
        # Whether records were dropped since the last call of `read`, and whether the
        # iteration that is read now lacks some of its own.
        self._has_gap = self._is_cut = False
        self._phases: deque[_Phase] = deque(maxlen=_MAX_PHASES)
        self._spans: deque[tuple[int, tuple[int, int]]] = deque(maxlen=_MAX_SPANS)
        self._finished: deque[_Iteration] = deque(maxlen=_ITERATIONS)
        self._follows = False
        self._values: dict[tuple[int, int], int] = {}
        self._peaks: dict[tuple[int, int], int] = {}
        self._read_ns: set[int] = set()
        self._begin_ns = 0

    def add(self, data: bytes) -> None:
        """Take records that were written."""
        with self._lock:
            self._unread.append(data)
            self._unread_bytes += len(data)
            while self._unread_bytes > _MAX_UNREAD_BYTES:
                self._unread_bytes -= len(self._unread.popleft())
                self._has_gap = True

    def read(self) -> None:
        """Sum up the records that were taken since the last call."""
        with self._lock:
            if self._has_gap:
                self._has_gap, self._is_cut = False, True
                self._finished.clear()
            data = b"".join(self._unread)
            self._unread.clear()
            self._unread_bytes = 0
            for record in RECORD.iter_unpack(data):
                self._read_record(*record)

    def _read_record(
        self,
        kind: int,
        code: int,
        small: int,
        a: int,
        b: int,
        _c: int,
        _w: int,
        x: int,
        y: int,
        _z: int,
    ) -> None:
        if kind == PHASE:
            read = y in self._read_ns
            self._phases.append(_Phase(code, a, x, y, small == ON_DEVICE, read))
        elif kind == GPU_TIMES:
            self._spans.append((a, (x, y)))
        elif kind == MEMORY:
            key = code, small
            self._values[key] = y
            self._peaks[key] = max(y, self._peaks.get(key, y))
            self._read_ns.add(x)
        elif kind == ITERATION and code == UPDATED:
            self._end_iteration(a)
        elif kind == START:
            self._begin_ns = x

    def _end_iteration(self, number: int) -> None:
        """Close an iteration, or extend the last one, if it has the same number."""
        phases, peaks = tuple(self._phases), self._peaks
        begin_ns, self._begin_ns = self._begin_ns, 0
        is_cut, self._is_cut = self._is_cut, False
        follows, self._follows = self._follows, self._follows or bool(phases)
        self._phases.clear()
        self._read_ns.clear()
        # The last value of a pool stands until the next reading.
        self._peaks = dict(self._values)
        if not phases or is_cut:
            return
        last = self._finished[-1] if self._finished else None
        if last is not None and last.number == number:
            self._finished.pop()
            phases, begin_ns, follows = (
                last.phases + phases,
                last.begin_ns,
                last.follows,
            )
            for key, size in last.peaks.items():
                peaks[key] = max(size, peaks.get(key, size))
        self._finished.append(_Iteration(number, begin_ns, follows, phases, peaks))

    def times(self) -> Iterator[IterationTimes]:
        """Yield the times of the iterations that ended last, the newest first.
        Iterations whose device times are not all known are left out, and the oldest one
        that is kept, whose start is not known."""
        spans = dict(self._spans)
        later: tuple[_Iteration, list[tuple[int, int]]] | None = None
        for iteration in reversed(self._finished):
            bounds = _bounds(iteration.phases, spans)
            if later is not None and bounds is not None:
                yield _times(*later, max(end_ns for _, end_ns in bounds))
            later = None if bounds is None else (iteration, bounds)
        if later is not None and not later[0].follows:
            yield _times(*later, later[0].begin_ns or None)

    def peaks(self, number: int) -> dict[tuple[int, int], int]:
        """Return peaks in bytes by pool and device, of the last iteration up to
        `number` that was wholly read."""
        iterations = [
            iteration for iteration in self._finished if iteration.number <= number
        ]
        # Of very short steps memory is read at the ends of some phases only.
        wholly_read = [
            iteration
            for iteration in iterations
            if all(phase.memory_read for phase in iteration.phases)
        ]
        return next(
            (iteration.peaks for iteration in reversed(wholly_read or iterations)), {}
        )


def _bounds(
    phases: Sequence[_Phase], spans: dict[int, tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return start and end of each phase, on the device if all ran there.

    Return None until the device has passed them all.
    """
    if not all(phase.on_device for phase in phases):
        return [(phase.start_ns, phase.end_ns) for phase in phases]
    bounds = [spans.get(phase.sequence) for phase in phases]
    return None if None in bounds else [bound for bound in bounds if bound is not None]


def _times(
    iteration: _Iteration, bounds: list[tuple[int, int]], previous_end_ns: int | None
) -> IterationTimes:
    earliest_ns = min(start_ns for start_ns, _ in bounds)
    # Device clocks are aligned to within microseconds: a first phase may seem to begin
    # before its iteration.
    start_ns = (
        earliest_ns if previous_end_ns is None else min(previous_end_ns, earliest_ns)
    )
    sums = [0] * len(PHASES)
    for phase, (phase_start_ns, phase_end_ns) in zip(iteration.phases, bounds):
        sums[phase.phase] += phase_end_ns - phase_start_ns
    return IterationTimes(
        iteration.number, start_ns, max(end_ns for _, end_ns in bounds), tuple(sums)
    )
