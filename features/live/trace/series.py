"""Time series of one rank, cut into the columns of a narrow chart."""

import numpy as np

from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.metrics.iterations import Intervals, intervals
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

# A sample of the GPU's state holds for so long at most.
_MAX_HOLD_NS = 1_000_000_000


def time_range(trace: Trace, rank: int, count: int) -> tuple[int, int] | None:
    """Return (start, end) in ns of a rank's last iterations.

    Without them, it is the time of the whole trace; None if nothing was recorded.
    """
    spans = intervals(trace, rank, device_times=False).spans.tail(count)
    if spans.empty:
        return trace.span_ns(rank)
    return int(spans["start_ns"].iloc[0]), int(spans["end_ns"].iloc[-1])


def column_edges(start_ns: int, end_ns: int, columns: int) -> Ints:
    """Return the edges of columns of equal length: one more than there are columns."""
    return np.linspace(start_ns, max(end_ns, start_ns + columns), columns + 1).astype(
        np.int64
    )


def gpu_columns(trace: Trace, rank: int, quantity: str, edges: Ints) -> Floats:
    """Return the value of a column of the table `gpu` at the end of each column; NaN
    where it was not sampled."""
    rows = trace.gpu(rank)
    rows = rows[(rows["device"] == main_device(trace, rank)) & rows[quantity].notna()]
    times, values = rows["t_ns"].to_numpy(np.int64), rows[quantity].to_numpy(np.float64)
    if not len(times):
        return np.full(len(edges) - 1, np.nan)
    index = np.searchsorted(times, edges[1:], side="right") - 1
    is_valid = (index >= 0) & (times[np.maximum(index, 0)] >= edges[:-1] - _MAX_HOLD_NS)
    sampled: Floats = np.where(is_valid, values[np.maximum(index, 0)], np.nan)
    return sampled


def phase_columns(times: Intervals, edges: Ints) -> list[str | None]:
    """Return the phase, or `other`, that takes most of each column.

    Return None outside of iterations.
    """
    rows = times.with_other
    rows = rows[(rows["end_ns"] > edges[0]) & (rows["start_ns"] < edges[-1])]
    time_ns = np.zeros((len(ITERATION_PARTS), len(edges) - 1))
    for phase, start, end in rows[["phase", "start_ns", "end_ns"]].itertuples(
        index=False, name=None
    ):
        first = max(0, int(np.searchsorted(edges, start, side="right")) - 1)
        last = min(len(edges) - 2, int(np.searchsorted(edges, end, side="left")) - 1)
        inside = slice(first, last + 1)
        lengths = np.minimum(edges[1:][inside], end) - np.maximum(
            edges[:-1][inside], start
        )
        time_ns[ITERATION_PARTS.index(phase), inside] += lengths
    most = time_ns.argmax(axis=0)
    return [
        ITERATION_PARTS[part] if time_ns[part, n] > 0 else None
        for n, part in enumerate(most)
    ]
