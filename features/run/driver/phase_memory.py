"""The job's own memory in each phase, by the records of the agent."""

from __future__ import annotations

from collections.abc import Callable

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

    `flush` makes the agent pass on what it has recorded so far.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Take records that were written."""
        if len(self._data) < _MAX_BYTES:
            self._data += data

    def spare_bytes(self) -> dict[str, float]:
        """Return by how much each phase is below the job's peak, in bytes.

        The first iteration does not count. Return {} where memory was not read in all
        phases.
        """
        self._flush()
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
    peaks: dict[str, float] = {}
    for code, start, end in phases:
        inside = [size for time, size in readings if start <= time <= end]
        before = [size for time, size in readings if time < start][-1:]
        if start >= updates[0] and (inside or before):
            name = PHASES[code]
            peaks[name] = max(peaks.get(name, 0.0), *inside, *before)
    return peaks
