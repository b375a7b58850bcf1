"""The high-water mark of the device memory that a job uses besides the optimizer."""

from __future__ import annotations

# Share of the device's memory that stays free: for fragments, for larger batches than the largest so far, and for what
# other processes allocate between two samples.
MARGIN = 0.08
# Results are multiples of this, so that small changes do not cause a new plan.
_UNIT = 64 << 20


class JobMemory:
    """Separates the memory that torch has reserved into that of the optimizer and that of the job, at its peak so far.

    torch keeps memory that was freed in pools, one for each stream. So the optimizer's memory stays reserved after a
    release, and its part of the reserved memory is its own peak since torch last returned memory to the device.
    """

    def __init__(self) -> None:
        # The highest sample, in bytes.
        self._job_peak = 0
        # Peaks of the optimizer's own memory, in bytes: since memory was returned, and since the last sample.
        self._own_peak = 0
        self._recent_own_peak = 0
        self._frees = 0

    def record_own(self, used_bytes: int) -> None:
        """Record the memory that the optimizer uses, after an allocation."""
        self._own_peak = max(self._own_peak, used_bytes)
        self._recent_own_peak = max(self._recent_own_peak, used_bytes)

    def sample(self, reserved_bytes: int, used_bytes: int, frees: int) -> None:
        """Record memory that torch has reserved, and how often it has returned some, and what the optimizer uses."""
        if frees != self._frees:
            self._frees = frees
            self._own_peak = self._recent_own_peak
        self._recent_own_peak = used_bytes
        self._job_peak = max(self._job_peak, reserved_bytes - self._own_peak)

    def budget(self, total_bytes: int, others_bytes: int) -> float:
        """Return what the job's peak so far, other processes and the CUDA context leave to the optimizer, in bytes."""
        left_bytes = int((1 - MARGIN) * total_bytes) - others_bytes - self._job_peak
        return float(max(0, left_bytes // _UNIT * _UNIT))
