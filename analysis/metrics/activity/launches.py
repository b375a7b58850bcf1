"""Delays and queue of the launches of compute kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.activity.busy_time import main_kernels
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class KernelLaunches:
    """Launches of compute kernels on the first device of a rank, over the whole trace.

    A kernel of a CUDA graph was launched by the launch of the graph.

    Attributes:
        count: Number of compute kernels whose launch was recorded.
        median_delay_us: Median of the times from the start of the launching call to the start of the kernel.
        p95_delay_us: Their 95th percentile, by linear interpolation.
        median_queued: Median over the launches of the number of these kernels that were launched before and had not
            yet begun, on any stream.
        p95_queued: Its 95th percentile.
    """

    count: int
    median_delay_us: float
    p95_delay_us: float
    median_queued: float
    p95_queued: float


def kernel_launches(trace: Trace, rank: int) -> KernelLaunches | None:
    """Measure the launches of compute kernels; None where no launch was recorded."""
    rows = main_kernels(trace, rank)
    rows = rows[(rows["kind"] == "compute") & rows["launch_ns"].notna()]
    if rows.empty:
        return None
    starts, launches = (np.sort(rows[column].to_numpy(np.int64)) for column in ("start_ns", "launch_ns"))
    delays = (rows["start_ns"].to_numpy(np.int64) - rows["launch_ns"].to_numpy(np.int64)) / 1e3
    # Clocks of host and device may differ by microseconds: a kernel then seems to begin before its launch.
    queued = np.maximum(np.searchsorted(launches, launches) - np.searchsorted(starts, launches, side="right"), 0)
    delay, depth = np.percentile(delays, [50, 95]), np.percentile(queued, [50, 95])
    return KernelLaunches(len(rows), float(delay[0]), float(delay[1]), float(depth[0]), float(depth[1]))
