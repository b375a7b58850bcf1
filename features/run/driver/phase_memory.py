"""The job's own memory in each phase, by the records of the agent."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from operator import itemgetter

from ebbtide.phases import PHASES
from ebbtide.profiler.agent.memory_reader import ALLOCATED, HEAP
from ebbtide.profiler.agent.spool import MEMORY, PHASE, RECORD

# Of torch's allocator on a GPU, and of the heap of a job on the CPU.
_POOLS = (ALLOCATED, HEAP)
_UPDATE = PHASES.index("update")
# Records of longer iterations are too many to keep.
_MAX_BYTES = 1 << 24


class PhaseMemory:
    """Keeps the records of the first iterations, for the windows of free memory.

    `flush` makes the agent pass on what it has recorded so far. The first question ends
    them.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._data = bytearray()
        self._spare: dict[str, float] | None = None

    def add(self, data: bytes) -> None:
        """Take records that were written."""
        if self._spare is None and len(self._data) < _MAX_BYTES:
            self._data += data

    def spare_bytes(self) -> dict[str, float]:
        """Return by how much each phase is below the job's peak, in bytes.

        The first iteration does not count. Return {} where memory was not read in all
        phases.
        """
        if self._spare is None:
            self._flush()
            self._spare = self._read()
            self._data.clear()
        return self._spare

    def _read(self) -> dict[str, float]:
        phases: list[tuple[int, int, int]] = []
        readings: list[tuple[int, int]] = []
        for kind, code, _, _, _, _, _, x, y, _ in RECORD.iter_unpack(bytes(self._data)):
            if kind == PHASE:
                phases.append((code, x, y))
            elif kind == MEMORY and code in _POOLS:
                readings.append((x, y))
        peaks = _peaks(phases, readings)
        if len(peaks) < len(PHASES):
            return {}
        highest = max(peaks.values())
        return {phase: highest - peak for phase, peak in peaks.items()}


def _peaks(
    phases: list[tuple[int, int, int]], readings: list[tuple[int, int]]
) -> dict[str, float]:
    """Return the largest reading in each phase, after the first update."""
    updates = [end for code, _, end in phases if code == _UPDATE]
    if not updates:
        return {}
    readings = sorted(readings, key=itemgetter(0))
    times = [time for time, _ in readings]
    peaks: dict[str, float] = {}
    for code, start, end in phases:
        # The last one before the phase holds at its start.
        first = max(0, bisect_left(times, start) - 1)
        sizes = [size for _, size in readings[first : bisect_right(times, end)]]
        if start >= updates[0] and sizes:
            name = PHASES[code]
            peaks[name] = max(peaks.get(name, 0.0), *sizes)
    return peaks
