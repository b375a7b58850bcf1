"""The rule on device memory that the driver of Windows keeps in host memory."""

from collections.abc import Iterator

import numpy as np

from ebbtide.analysis.findings.finding import Finding, clamp_gain
from ebbtide.analysis.findings.needs import GPU, MEASURED, SEPARATE_MEMORY
from ebbtide.analysis.findings.rule import rule
from ebbtide.analysis.metrics.devices import first_device, pool_peaks
from ebbtide.analysis.metrics.drift import Drift
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.phases import ITERATION_PARTS
from ebbtide.units import bytes_text, ms_text

SETTING = (
    "in the NVIDIA control panel (Manage 3D settings) choose 'CUDA - Sysmem Fallback "
    "Policy: Prefer No Sysmem Fallback': the job then fails early instead of running "
    "many times slower; let it take less memory (`ebbtide plan`)"
)
_TORCH_POOLS = ("allocated", "reserved")
_FULL_SHARE = 0.95
# Memory that grew by less was full before the jump.
_MIN_GROWTH_SHARE = 0.01
_MIN_JUMP = 1.5


@rule("spilled-memory", GPU, MEASURED, SEPARATE_MEMORY)
def spilled_memory(metrics: JobMetrics) -> Finding | None:
    """Compare what torch holds with the device, and look for iterations that become
    longer at once when the memory is full, as under Windows and WSL."""
    above = list(_pools_above_capacity(metrics))
    if above:
        return spilled_memory.finding(
            "The driver keeps a part of the device's memory in host memory",
            None,
            above,
            SETTING,
        )
    kernel = metrics.trace.meta.host.kernel
    if kernel is not None and "microsoft" not in kernel.lower():
        return None
    for jump in metrics.drifts:
        text = _full_text(metrics, jump)
        if text is not None:
            unsure = "" if kernel else "if the job runs under Windows or WSL: "
            return spilled_memory.finding(
                "Iterations become longer when the device's memory is full",
                clamp_gain(jump.mean_change),
                (text,),
                unsure + SETTING,
            )
    return None


def _pools_above_capacity(metrics: JobMetrics) -> Iterator[str]:
    for rank in metrics.trace.ranks:
        capacity = first_device(metrics.trace, rank).capacity_bytes
        peaks = pool_peaks(metrics.trace, rank)
        for pool in _TORCH_POOLS:
            if capacity is not None and peaks.get(pool, 0) > capacity:
                yield (
                    f"rank {rank}: {bytes_text(peaks[pool])} {pool} on a device of "
                    f"{bytes_text(capacity)}"
                )
                break


def _full_text(metrics: JobMetrics, jump: Drift) -> str | None:
    """Return how full the memory is from a jump of the iteration time on; None where
    there is no jump, or the memory was not full or full before."""
    if (
        jump.quantity != "iteration_time"
        or jump.is_gradual
        or jump.after < _MIN_JUMP * jump.before
    ):
        return None
    for rank in metrics.trace.ranks:
        capacity = first_device(metrics.trace, rank).capacity_bytes or 0
        for pool in pool_peaks(metrics.trace, rank):
            if pool not in ("device", *_TORCH_POOLS):
                continue
            peaks = phase_peaks(metrics.trace, rank, pool)
            peaks = peaks.only(metrics.steady_iterations)
            sizes = peaks.largest(ITERATION_PARTS)
            is_later = peaks.numbers >= jump.first
            if not is_later.any() or is_later.all() or np.isnan(sizes).any():
                continue
            before, after = np.median(sizes[~is_later]), np.median(sizes[is_later])
            grown = after - before >= _MIN_GROWTH_SHARE * capacity
            if capacity and grown and after >= _FULL_SHARE * capacity:
                return (
                    f"from iteration {jump.first:.0f} on iterations take "
                    f"{ms_text(jump.after)} instead of {ms_text(jump.before)}, and "
                    f"{bytes_text(after)} of {bytes_text(capacity)} are {pool} "
                    f"({bytes_text(before)} before)"
                )
    return None
