"""Keeps the figures of the iterations that ended last, for a job that asks for them
(`ebbtide.metrics`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .gpu_clock import DeviceSpan, EventMark
from .memory_reader import Reading
from .spool import PHASES


class PhaseRecord(NamedTuple):
    """A finished phase. `micro_batch` and `source` count from 1; 0: not known."""

    phase: int
    sequence: int
    micro_batch: int
    source: int
    start_ns: int
    end_ns: int
    start_mark: EventMark | None
    end_mark: EventMark | None


# The device may lag some iterations behind the host, and the samples of the link a
# second.
_ITERATIONS = 128
# Phases without an end of an iteration: a job whose optimizer is not seen.
_MAX_PHASES = 8192
_MAX_SPANS = 8192


# A phase, and whether memory was read at its end.
_Phase = tuple[PhaseRecord, bool]


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
    """Times of an iteration in ns of CLOCK_MONOTONIC: those of the device where it ran
    there, else of the host."""

    number: int
    # End of the iteration before; start of the first phase where there is none.
    start_ns: int
    end_ns: int
    phase_ns: tuple[int, ...]  # Sum of each phase, in the order of `spool.PHASES`.


class IterationFigures:
    """Collects phases and memory readings, and sums them up only when a job asks."""

    def __init__(self) -> None:
        self._phases: deque[_Phase] = deque(maxlen=_MAX_PHASES)
        self._spans: deque[DeviceSpan] = deque(maxlen=_MAX_SPANS)
        self._finished: deque[_Iteration] = deque(maxlen=_ITERATIONS)
        self._values: dict[tuple[int, int], int] = {}
        self._peaks: dict[tuple[int, int], int] = {}
        self._begin_ns = 0

    def add_phase(self, record: PhaseRecord, read: bool) -> None:
        """Add a phase that was written. read: Whether memory was read at its end."""
        self._phases.append((record, read))

    def add_device_times(self, span: DeviceSpan) -> None:
        """Add the device times of a phase or an operation."""
        self._spans.append(span)

    def add_memory(self, readings: Iterable[Reading]) -> None:
        """Add readings of memory, from any thread."""
        for pool, device, size in readings:
            key = pool, device
            self._values[key] = size
            if size > self._peaks.get(key, -1):
                self._peaks[key] = size

    def begin(self, start_ns: int) -> None:
        """Note where the first recorded iteration begins, if that is not at its first
        phase."""
        self._begin_ns = start_ns

    def end_iteration(self, number: int) -> None:
        """Close an iteration, or extend the last one, if it has the same number."""
        phases, peaks = tuple(self._phases), self._peaks
        self._phases.clear()
        # The last value of a pool stands until the next reading.
        self._peaks = dict(self._values)
        if not phases:
            return
        last = self._finished[-1] if self._finished else None
        begin_ns, follows = self._begin_ns, last is not None
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
        self._begin_ns = 0

    def times(self) -> Iterator[IterationTimes]:
        """Yield the times of the iterations that ended last, the newest first.
        Iterations whose device times are not all known are left out, and the oldest one
        that is kept, whose start is not known."""
        spans = {
            span.sequence: (span.start_ns, span.end_ns) for span in list(self._spans)
        }
        later: tuple[_Iteration, list[tuple[int, int]]] | None = None
        for iteration in reversed(list(self._finished)):
            bounds = _bounds(iteration.phases, spans)
            if later is not None and bounds is not None:
                yield _times(*later, max(end_ns for _, end_ns in bounds))
            later = None if bounds is None else (iteration, bounds)
        if later is not None and not later[0].follows:
            yield _times(*later, later[0].begin_ns or None)

    def peaks(self, number: int) -> dict[tuple[int, int], int]:
        """Return peaks in bytes by pool and device: of the last iteration up to
        `number` that was wholly read."""
        iterations = [
            iteration
            for iteration in list(self._finished)
            if iteration.number <= number
        ]
        # Of very short steps memory is read at the ends of some phases only.
        wholly_read = [
            iteration
            for iteration in iterations
            if all(read for _, read in iteration.phases)
        ]
        return next(
            (iteration.peaks for iteration in reversed(wholly_read or iterations)), {}
        )


def _bounds(
    phases: Sequence[_Phase], spans: dict[int, tuple[int, int]]
) -> list[tuple[int, int]] | None:
    """Return start and end of each phase, on the device if all ran there; None until it
    has passed them all."""
    records = [record for record, _ in phases]
    if not all(_ran_on_device(record) for record in records):
        return [(record.start_ns, record.end_ns) for record in records]
    bounds = [spans.get(record.sequence) for record in records]
    return None if None in bounds else [bound for bound in bounds if bound is not None]


def _ran_on_device(record: PhaseRecord) -> bool:
    start, end = record.start_mark, record.end_mark
    return start is not None and end is not None and start.device == end.device


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
    for (record, _), (phase_start_ns, phase_end_ns) in zip(iteration.phases, bounds):
        sums[record.phase] += phase_end_ns - phase_start_ns
    return IterationTimes(
        iteration.number, start_ns, max(end_ns for _, end_ns in bounds), tuple(sums)
    )
