"""The device and the memory pools that a rank's figures describe."""

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace, recent_per_trace
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.machines.sheets import preset_of
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.metadata import DeviceInfo

# A smaller share of a memory that GPU and CPU share was stated for the job alone.
_SAME_CAPACITY = 0.97


@recent_per_trace
def memory_timeline(
    trace: Trace, rank: int, pool: str, device: str | None = None
) -> tuple[Ints, Ints]:
    """Return (times in ns, bytes) of a pool on a device.

    None: on the rank's first device, or the host for its pools.
    """
    rows = trace.columns(rank, "memory")
    selected = rows.equal("pool", pool)
    on_device = selected & rows.equal("device", device or main_device(trace, rank))
    if device is not None or on_device.any():
        selected = on_device
    return rows.ints("t_ns")[selected], rows.ints("bytes")[selected]


@once_per_trace
def pool_peaks(trace: Trace, rank: int) -> dict[str, int]:
    """Return the largest value of each recorded pool of a rank, bytes."""
    pools = trace.labels(rank, "memory", "pool")
    return {pool: int(memory_timeline(trace, rank, pool)[1].max()) for pool in pools}


def main_device(trace: Trace, rank: int) -> str | None:
    """Return the name of the rank's first device, `cuda:0` or `cpu`."""
    return first_device(trace, rank).device


def capacity_bytes(trace: Trace, rank: int) -> int | None:
    """Return the memory of the rank's first device, or of the host where the job runs
    on the CPU, without the system's share where a card is known to share it."""
    device = first_device(trace, rank)
    sheet, capacity = preset_of(device.name), device.capacity_bytes
    if sheet is None or capacity is None or not sheet.system_gib:
        return capacity
    system_bytes = round(2**30 * sheet.system_gib)
    is_all = capacity > _SAME_CAPACITY * 2**30 * sheet.memory_gib
    return capacity - system_bytes if is_all else capacity


def ran_on_cpu(trace: Trace) -> bool:
    """Return whether the first device of every rank is the CPU.

    The capacity is the capacity of host memory then.
    """
    return bool(trace.ranks) and all(
        first_device(trace, rank).kind == "cpu" for rank in trace.ranks
    )


def capacity_name(trace: Trace) -> str:
    """Return `capacity` for a GPU, or `host memory` for a job without one."""
    return "host memory" if ran_on_cpu(trace) else "capacity"


def free_memory_text(trace: Trace) -> str:
    """Return the definition of free memory in a trace.

    An example is `capacity minus reserved`.
    """
    of_job = "this job's " if ran_on_cpu(trace) else ""
    return f"{capacity_name(trace)} minus {of_job}{free_pool(trace)}"


def link_peak(trace: Trace, rank: int) -> float | None:
    """Return the peak bytes/s of the first device's link in one direction.

    Return None where it was not recorded.
    """
    return first_device(trace, rank).link.peak_bytes_per_s


def first_device(trace: Trace, rank: int) -> DeviceInfo:
    """Return the device that a rank's figures describe; an empty entry where the trace
    has none."""
    return trace.rank(rank).main_device


RSS = "rss"
# Pools that count the memory of a device, the most complete first.
_FREE_POOLS = (
    "device",
    "cuda",
    "reserved",
    "allocated",
    "requested",
    # On the CPU: what the whole process holds, not torch alone.
    RSS,
    "tensors",
    "heap",
)
# The pools of recorded allocations.
ALLOCATION_POOLS = ("requested", "tensors")
_PEAK_POOLS = ("device", "allocated", "requested", "tensors", "cuda", "heap")


def free_pool(trace: Trace) -> str | None:
    """Return the pool that free memory is computed from: the first recorded of
    _FREE_POOLS; None without memory of a device.

    Memory that torch has reserved is not free for others, even if no tensor uses it."""
    return _first_recorded(trace, _FREE_POOLS)


def peak_pool(trace: Trace) -> str | None:
    """Return the pool whose peaks are reported: the first recorded of _PEAK_POOLS; None
    without memory of a device.

    `reserved` is not one of them: it includes blocks that no tensor uses, so its peak
    says little about the job."""
    return _first_recorded(trace, _PEAK_POOLS)


@once_per_trace
def _rss_is_known(trace: Trace) -> bool:
    """Return whether the resident memory of each rank was sampled before its first
    steady iteration began: short jobs end before that."""
    steady = steady_iterations(trace).numbers
    for rank in trace.ranks:
        phases = trace.columns(rank, "phases")
        is_steady = np.isin(phases.ints("iteration"), steady)
        starts = phases.ints("start_ns")[phases.recorded("iteration") & is_steady]
        times, _ = memory_timeline(trace, rank, RSS)
        if len(starts) and not (len(times) and times[0] <= starts.min()):
            return False
    return True


def _first_recorded(trace: Trace, pools: tuple[str, ...]) -> str | None:
    recorded = _recorded_pools(trace)
    if RSS in recorded and not (ran_on_cpu(trace) and _rss_is_known(trace)):
        recorded -= {RSS}
    if trace.meta.options.on_demand:
        # Allocations are known in fewer iterations than the other pools.
        pools = (
            *(pool for pool in pools if pool not in ALLOCATION_POOLS),
            *ALLOCATION_POOLS,
        )
    return next((pool for pool in pools if pool in recorded), None)


@once_per_trace
def _recorded_pools(trace: Trace) -> frozenset[str]:
    return frozenset(
        pool for rank in trace.ranks for pool in trace.labels(rank, "memory", "pool")
    )
