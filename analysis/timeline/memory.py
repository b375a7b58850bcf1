"""Memory panels of a timeline."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.metrics import devices
from ebbtide.analysis.metrics.holders.holders import memory_by_category, recorded_span
from ebbtide.analysis.metrics.memory_spans import memory_with_gaps
from ebbtide.analysis.timeline.axis import Resolution, TimeAxis
from ebbtide.analysis.timeline.panels import (
    TimelineLine,
    TimelinePanel,
    TimelineStack,
    stack_categories,
)
from ebbtide.analysis.timeline.styles import STACK_TOP, LineStyle, pool_styles
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, peak_between
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text

# The sum of the recorded allocations of a CPU.
_WHOLE = "tensors"
_UNKNOWN = "unknown"
# In a gap: below every size, and below every size with its sign changed.
_UNKNOWN_SIZE = -(2**62)


def device_memory_panel(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> TimelinePanel:
    """Return the panel of a rank's device; empty where no memory was recorded.

    Memory by category is behind the lines, and pools of the host are included where the
    device is the CPU. It is empty if nothing was recorded in the interval.
    """
    capacity = devices.capacity_bytes(trace, rank)
    stack = _category_stack(trace, rank, axis, resolution)
    excluded = _host_pools(trace, rank)
    if stack is not None and trace.meta.source == "recorded":
        # Its line would go on where nothing was recorded; the stack has the same top.
        excluded.add(_WHOLE)
    pools = [pool for pool in _pools(trace, rank) if pool not in excluded]
    lines = _lines(trace, rank, pools, axis, resolution)
    if stack is not None:
        lines = tuple(
            replace(line, style=STACK_TOP) if line.name == _WHOLE else line
            for line in lines
        )
    pool = None if capacity is None else devices.free_pool(trace)
    return TimelinePanel(
        "host memory" if devices.ran_on_cpu(trace) else "memory",
        lines,
        capacity,
        ""
        if capacity is None
        else f"{devices.capacity_name(trace)} {bytes_text(capacity)}",
        pool if any(line.name == pool for line in lines) else None,
        stack,
    )


def free_memory_panel(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> TimelinePanel:
    """Return the panel of a rank's device with the one line that free memory is
    computed from."""
    panel = device_memory_panel(trace, rank, axis, resolution)
    lines = tuple(line for line in panel.lines if line.name == panel.free_pool)
    return TimelinePanel(
        panel.name, lines, panel.level, panel.level_label, panel.free_pool
    )


def host_memory_panel(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> TimelinePanel | None:
    """Return the panel of host memory, which has a scale of its own.

    On this scale the lines of the device would be flat. None where no pool of the host
    was recorded, or the device is the CPU.
    """
    host_pools = _host_pools(trace, rank)
    pools = [pool for pool in _pools(trace, rank) if pool in host_pools]
    lines = _lines(trace, rank, pools, axis, resolution)
    return TimelinePanel("host memory", lines) if lines else None


def _pools(trace: Trace, rank: int) -> list[str]:
    return [str(pool) for pool in trace.memory(rank)["pool"].unique()]


def _host_pools(trace: Trace, rank: int) -> set[str]:
    rows = trace.memory(rank)
    on_device = set(
        rows.loc[rows["device"] == devices.main_device(trace, rank), "pool"].unique()
    )
    return set(rows.loc[rows["device"] == "cpu", "pool"].unique()) - on_device


def _category_stack(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> TimelineStack | None:
    """Return memory by category, from recorded allocations."""
    device = devices.main_device(trace, rank)
    by_category = memory_by_category(trace, rank, device) if device is not None else {}
    if device is None or not by_category:
        return None
    end_ns = recorded_span(trace, rank, device)[1]
    # Allocations are recorded for a part of a job: 0 from its end on.
    ended = {
        name or _UNKNOWN: (
            np.append(times[times < end_ns], end_ns),
            np.append(sizes[times < end_ns], 0),
        )
        for name, (times, sizes) in by_category.items()
    }
    return stack_categories(ended, axis, resolution)


def _lines(
    trace: Trace, rank: int, pools: list[str], axis: TimeAxis, resolution: Resolution
) -> tuple[TimelineLine, ...]:
    lines = [
        line
        for pool, style in pool_styles(pools).items()
        if (line := pool_line(trace, rank, pool, style, axis, resolution)) is not None
    ]
    # An empty pool carries no information, except those that other figures are computed
    # from.
    main_pools = (devices.free_pool(trace), devices.peak_pool(trace))
    return tuple(
        line for line in lines if line.name in main_pools or (line.values > 0).any()
    )


def pool_line(
    trace: Trace,
    rank: int,
    pool: str,
    style: LineStyle,
    axis: TimeAxis,
    resolution: Resolution,
) -> TimelineLine | None:
    """Return the line of a pool within the axis; None where it has no value there."""
    times, sizes, recorded = memory_with_gaps(trace, rank, pool)
    first = max(int(np.searchsorted(times, axis.start_ns, side="right")) - 1, 0)
    after = int(np.searchsorted(times, axis.end_ns, side="right"))
    if not recorded[first:after].any():
        return None
    times, sizes, recorded = (
        times[first:after].clip(axis.start_ns),
        sizes[first:after],
        recorded[first:after],
    )
    length = int(axis.end_ns - times[0])
    slots = resolution.slots_within(length, axis.length_ns)
    if len(times) <= resolution.steps_per_slot * slots:
        return TimelineLine(
            pool, np.append(times, axis.end_ns), _with_nan(sizes, recorded), style
        )
    edges = times[0] + np.linspace(0, length, slots + 1).astype(np.int64)
    largest, lowest = (
        sign
        * peak_between(
            times,
            np.where(recorded, sign * sizes, _UNKNOWN_SIZE),
            edges[:-1],
            edges[1:],
        )
        for sign in (1, -1)
    )
    recorded = largest > _UNKNOWN_SIZE
    return TimelineLine(
        pool,
        edges,
        _with_nan(largest, recorded),
        style,
        _with_nan(lowest, recorded),
        slot_ns=axis.length_ns / resolution.slots,
    )


def _with_nan(sizes: Floats | Ints, recorded: npt.NDArray[np.bool_]) -> Floats | Ints:
    """Return sizes as integers.

    Where some of them are not known, return floats with NaN there.
    """
    return (
        sizes.astype(np.int64) if recorded.all() else np.where(recorded, sizes, np.nan)
    )
