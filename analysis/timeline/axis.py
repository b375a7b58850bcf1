"""The time axis of a timeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.profiler.trace import Trace

# Axes at least this long count in seconds, shorter ones in milliseconds.
_SECONDS_FROM_NS = 2e9


@dataclass(frozen=True)
class TimeAxis:
    """An interval of a trace and its unit."""

    origin_ns: int  # Time of the trace that is 0 on the axis.
    start_ns: int  # Start of the interval.
    end_ns: int  # End of the interval.
    # Length of the longest of all axes that are drawn to one scale; sets the unit and the level of detail.
    length_ns: int

    @property
    def unit(self) -> str:
        """`s` or `ms`."""
        return "s" if self.length_ns >= _SECONDS_FROM_NS else "ms"

    @property
    def unit_ns(self) -> float:
        """Nanoseconds per unit."""
        return 1e9 if self.unit == "s" else 1e6

    def x(self, times: Ints) -> Floats:
        """Convert times of the trace (ns) to the unit of the axis."""
        return np.asarray((times - self.origin_ns) / self.unit_ns)

    def overlaps(self, starts: Ints, ends: Ints) -> npt.NDArray[np.bool_]:
        """Return which of some intervals (ns) have time in common with the axis."""
        return np.asarray((ends > self.start_ns) & (starts < self.end_ns))


def recorded_interval(trace: Trace, rank: int) -> tuple[int, int] | None:
    """Return (start ns, end ns) of phases, memory and link samples, copies and kernels; None where there are none."""
    phases, memory = trace.phases(rank), trace.memory(rank)["t_ns"]
    link, copies, kernels = trace.link(rank), trace.transfers(rank), trace.kernels(rank)
    bounds = [
        (int(starts.min()), int(ends.max()))
        for starts, ends in (
            (phases["start_ns"], phases["end_ns"]),
            (phases["gpu_start_ns"].dropna(), phases["gpu_end_ns"].dropna()),
            (memory, memory),
            (link["t_ns"] - link["window_ns"], link["t_ns"]),
            (copies["start_ns"], copies["end_ns"]),
            (kernels["start_ns"], kernels["end_ns"]),
        )
        if len(starts) and len(ends)
    ]
    return (min(start for start, _ in bounds), max(end for _, end in bounds)) if bounds else None
