"""Puts a trace on the clock of its GPUs, which run after the host that launches their work."""

from collections.abc import Callable

import numpy as np

from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Columns

_TIMES = {"phases": ("start_ns", "end_ns"), "iteration_marks": ("start_ns", "end_ns"), "memory": ("t_ns",)}


def on_device_clock(trace: Trace) -> Trace:
    """Return the trace with phases and memory at the times of the GPU, as in the order of its work.

    A time of the host within a phase becomes the same position in that phase on the GPU. Ranks whose phases have no
    times of the GPU stay as they are; the trace itself is returned where all do."""
    clocks = {rank: clock for rank in trace.ranks if (clock := _clock(trace, rank)) is not None}

    def load(rank: int, name: str) -> Columns:
        if rank not in clocks or name not in _TIMES:
            return trace.columns(rank, name)
        rows, to_device = trace.table(rank, name), clocks[rank]
        return Columns(name, rows.assign(**{key: to_device(rows[key].to_numpy(np.int64)) for key in _TIMES[name]}))

    return Trace(trace.path, trace.raw_meta, load, trace.labels) if clocks else trace


def _clock(trace: Trace, rank: int) -> Callable[[Ints], Ints] | None:
    """Return the function from times of the host to those of the GPU; None where they are not known."""
    host, device = (intervals(trace, rank, device_times).times for device_times in (False, True))
    if not len(host.starts) or np.array_equal(host.starts, device.starts):
        return None
    before, after = (np.stack([times.starts, times.ends], axis=1).ravel() for times in (host, device))
    ahead = np.maximum.accumulate(after) - before
    return lambda at: at + np.rint(np.interp(at, before, ahead)).astype(np.int64)
