"""The figures of one rank, each computed when it is first asked for, and once."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    first_device,
    memory_timeline,
)
from ebbtide.profiler.trace import Trace

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.activity.activity import GpuActivity
    from ebbtide.analysis.metrics.activity.busy_time import BusyTime
    from ebbtide.analysis.metrics.critical_path.critical_path import CriticalPath
    from ebbtide.analysis.metrics.holders.categories import Growth
    from ebbtide.analysis.metrics.iterations import IterationTable
    from ebbtide.analysis.timeseries.step_functions import Ints
    from ebbtide.profiler.trace.metadata import DeviceInfo


class RankMetrics:
    """The figures of a rank. Figures that were not recorded are None."""

    def __init__(self, trace: Trace, rank: int) -> None:
        self.trace = trace
        self.rank = rank

    @property
    def device(self) -> DeviceInfo:
        """The rank's first device."""
        return first_device(self.trace, self.rank)

    @property
    def capacity_bytes(self) -> int | None:
        """Memory of the rank's device."""
        return capacity_bytes(self.trace, self.rank)

    @property
    def series(self) -> IterationTable:
        """Times, rates and free memory by steady iteration, as the columns of
        `rank_series`."""
        from ebbtide.analysis.metrics.ranks.rank_series import rank_series

        return rank_series(self.trace, self.rank)

    @cached_property
    def activity(self) -> GpuActivity:
        """Compute, communication, copies and idle time of the rank's first GPU."""
        from ebbtide.analysis.metrics.activity.activity import gpu_activity

        return gpu_activity(self.trace, self.rank)

    @property
    def critical_path(self) -> CriticalPath | None:
        """The critical path of the median iteration; None without kernels or
        iterations."""
        from ebbtide.analysis.metrics.critical_path.critical_path import critical_path

        return critical_path(self.trace, self.rank)

    @property
    def busy_time(self) -> BusyTime | None:
        """Times in which the rank's first GPU computes, communicates and copies; None
        where not recorded."""
        from ebbtide.analysis.metrics.activity.busy_time import busy_time

        return busy_time(self.trace, self.rank)

    @property
    def memory_growth(self) -> list[Growth] | None:
        """Call sites that leave blocks behind in every iteration; None where
        allocations were not recorded."""
        from ebbtide.analysis.metrics.holders.categories import memory_growth

        return memory_growth(self.trace, self.rank)

    def memory_timeline(self, pool: str) -> tuple[Ints, Ints]:
        """Return the times (ns) and bytes of a pool."""
        return memory_timeline(self.trace, self.rank, pool)

    def has_operation(self, name: str) -> bool:
        """Return whether an operation of this name was recorded."""
        from ebbtide.analysis.metrics.substeps.operations import op_names

        return name in op_names(self.trace, self.rank)
