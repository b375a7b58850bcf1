"""Keeps the figures of the iterations that ended last, for a job that asks for them (`ebbtide.metrics`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from .gpu_clock import DeviceSpan, EventMark
from .memory_reader import Reading
from .spool import PHASES

FORWARD, BACKWARD, UPDATE = range(len(PHASES))


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


class _Stepper:
    """An optimizer that steps, and its parameters by id. It keeps none of them alive."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.has_stepped = False
        self.parameters: dict[int, ref[Any]] = {}
        self._size = 0, 0

    def read(self, optimizer: Any) -> None:
        """Add parameters that the optimizer has got since the last call."""
        # Not of optimizers that contain others: reading their properties may have effects.
        groups = getattr(optimizer, "__dict__", {}).get("param_groups")
        size = (len(groups), len(groups[-1]["params"])) if groups else (0, 0)
        if size != self._size:
            self._size = size
            for group in groups or ():
                self.parameters.update((id(parameter), ref(parameter)) for parameter in group["params"])


class IterationRule:
    """Numbers iterations as optimizers step; `index`: the current one, -1 before the first update. An iteration ends at
    the last update before an optimizer, or a parameter, that has already stepped in it steps again after a backward:
    the two optimizers of a GAN make one, and gradient accumulation adds none, nor do ZeRO-3, which steps once per
    subgroup, and distributed checkpointing, which steps once before training to create state. Where an optimizer that
    has stepped in it is gone by then, a new one ends it, too."""

    def __init__(self) -> None:
        self.index = -1
        self._backwards = 0  # that had begun at the last update
        self._steppers: WeakKeyDictionary[Any, _Stepper] = WeakKeyDictionary()
        # Those that have stepped in this iteration, by the id of the optimizer: before the last backward, and since.
        self._before: dict[int, _Stepper] = {}
        self._since: dict[int, _Stepper] = {}
        self._parameters_before: dict[int, ref[Any]] | None = None  # None: not collected yet

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped."""
        return live_keys(self._steppers)

    def add_update(self, optimizers: list[Any], backwards: int) -> int | None:
        """Account for one update, after so many `backwards` that have begun in this process, and return the iteration
        that it ends (the same number again while updates extend it); None if it belongs to none."""
        if backwards > self._backwards:
            self._backwards = backwards
            self._before.update(self._since)
            self._since, self._parameters_before = {}, None
        steppers = {id(optimizer): self._stepper(optimizer) for optimizer in optimizers}
        if any(self._begins(key, stepper) for key, stepper in steppers.items()):
            self.index += 1
            self._before, self._since, self._parameters_before = {}, {}, None
        for stepper in steppers.values():
            stepper.has_stepped = True
        self._since.update(steppers)
        return self.index if self.index >= 0 else None

    def _stepper(self, optimizer: Any) -> _Stepper:
        stepper = self._steppers.get(optimizer)
        if stepper is None:
            stepper = self._steppers[optimizer] = _Stepper(optimizer)
        stepper.read(optimizer)
        return stepper

    def _begins(self, key: int, stepper: _Stepper) -> bool:
        """Return whether an optimizer begins an iteration by its step."""
        if self.index < 0:
            return self._backwards > 0
        before = self._before
        if not before:
            return False
        if before.get(key) is stepper:
            return True
        if not stepper.has_stepped and any(other.optimizer() is None for other in before.values()):
            return True
        if self._parameters_before is None:
            self._parameters_before = {}
            for other in before.values():
                self._parameters_before.update(other.parameters)
        common = self._parameters_before.keys() & stepper.parameters.keys()
        # An object has one reference, and another that has got its address has its own.
        return any(self._parameters_before[key] is stepper.parameters[key] for key in common)


def live_keys(mapping: WeakKeyDictionary[Any, Any]) -> list[Any]:
    """Return the keys, copied in one step: another thread may add one meanwhile."""
    return [key for reference in mapping.keyrefs() if (key := reference()) is not None]


# The device may lag some iterations behind the host, and the samples of the link a second.
_ITERATIONS = 128
# Phases without an end of an iteration: a job whose optimizer is not seen.
_MAX_PHASES = 8192
_MAX_SPANS = 8192


# A phase, and whether memory was read at its end.
_Phase = tuple[PhaseRecord, bool]


class _Iteration(NamedTuple):
    """A finished iteration."""

    number: int
    begin_ns: int  # Start of the first iteration that was recorded, where that is before its first phase; else 0.
    follows: bool  # Whether another iteration ended before it.
    phases: tuple[_Phase, ...]
    peaks: dict[tuple[int, int], int]  # The largest readings in bytes, by pool and device.


class IterationTimes(NamedTuple):
    """Times of an iteration in ns of CLOCK_MONOTONIC: those of the device where it ran there, else of the host."""

    number: int
    start_ns: int  # End of the iteration before; start of the first phase where there is none.
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
        """Note where the first recorded iteration begins, if that is not at its first phase."""
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
            phases, begin_ns, follows = last.phases + phases, last.begin_ns, last.follows
            for key, size in last.peaks.items():
                peaks[key] = max(size, peaks.get(key, size))
        self._finished.append(_Iteration(number, begin_ns, follows, phases, peaks))
        self._begin_ns = 0

    def times(self) -> Iterator[IterationTimes]:
        """Yield the times of the iterations that ended last, the newest first. Iterations whose device times are not
        all known are left out, and the oldest one that is kept, whose start is not known."""
        spans = {span.sequence: (span.start_ns, span.end_ns) for span in list(self._spans)}
        later: tuple[_Iteration, list[tuple[int, int]]] | None = None
        for iteration in reversed(list(self._finished)):
            bounds = _bounds(iteration.phases, spans)
            if later is not None and bounds is not None:
                yield _times(*later, max(end_ns for _, end_ns in bounds))
            later = None if bounds is None else (iteration, bounds)
        if later is not None and not later[0].follows:
            yield _times(*later, later[0].begin_ns or None)

    def peaks(self, number: int) -> dict[tuple[int, int], int]:
        """Return peaks in bytes by pool and device: of the last iteration up to `number` that was wholly read."""
        iterations = [iteration for iteration in list(self._finished) if iteration.number <= number]
        # Of very short steps memory is read at the ends of some phases only.
        wholly_read = [iteration for iteration in iterations if all(read for _, read in iteration.phases)]
        return next((iteration.peaks for iteration in reversed(wholly_read or iterations)), {})


def _bounds(phases: Sequence[_Phase], spans: dict[int, tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Return start and end of each phase, on the device if all ran there; None until it has passed them all."""
    records = [record for record, _ in phases]
    if not all(_ran_on_device(record) for record in records):
        return [(record.start_ns, record.end_ns) for record in records]
    bounds = [spans.get(record.sequence) for record in records]
    return None if None in bounds else [bound for bound in bounds if bound is not None]


def _ran_on_device(record: PhaseRecord) -> bool:
    start, end = record.start_mark, record.end_mark
    return start is not None and end is not None and start.device == end.device


def _times(iteration: _Iteration, bounds: list[tuple[int, int]], previous_end_ns: int | None) -> IterationTimes:
    earliest_ns = min(start_ns for start_ns, _ in bounds)
    # Device clocks are aligned to within microseconds: a first phase may seem to begin before its iteration.
    start_ns = earliest_ns if previous_end_ns is None else min(previous_end_ns, earliest_ns)
    sums = [0] * len(PHASES)
    for (record, _), (phase_start_ns, phase_end_ns) in zip(iteration.phases, bounds):
        sums[record.phase] += phase_end_ns - phase_start_ns
    return IterationTimes(iteration.number, start_ns, max(end_ns for _, end_ns in bounds), tuple(sums))
