"""Lanes of a GPU's activity.

In each step they have the share of the time that it computes, communicates, copies and
is idle.
"""

import numpy as np

from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.activity.phase_activity import time_without_compute
from ebbtide.analysis.timeline.axis import Resolution, TimeAxis
from ebbtide.analysis.timeline.panels import StackLayer, TimelineStack
from ebbtide.analysis.timeline.styles import ACTIVITY_STYLES
from ebbtide.analysis.timeseries.step_functions import (
    Ints,
    Union,
    difference,
    merged,
    overlap_ns,
)
from ebbtide.profiler.trace import Trace

# Causes of idle time from the bottom of their lane, with the names of their areas.
IDLE_CAUSES = {
    "host_busy": "idle: host busy",
    "late_launch": "idle: late launch",
    "queue": "idle: queue",
    "unknown": "idle: launch not recorded",
}
# Name of the time between the first and the last activity in which a recording paused.
PAUSE = "not recorded"


def activity_lanes(
    trace: Trace, rank: int, axis: TimeAxis, resolution: Resolution
) -> dict[str, TimelineStack]:
    """Return the lanes of a rank's first device by name, from the bottom: idle (by its
    cause, and the pauses of a recording), copy, communication, compute; none where
    kernels were not recorded.

    Values are shares of the time: 0 or 1, or the share of a slot of the axis where
    there are more changes than the resolution allows."""
    busy = busy_time(trace, rank)
    if busy is None:
        return {}
    causes = dict(time_without_compute(trace, rank))
    # A launching call keeps the host busy.
    causes["host_busy"] = merged(causes["host_busy"], causes["launch_call"])
    idle = {cause: causes[cause] for cause in IDLE_CAUSES if cause in causes}
    starts, ends = busy.recorded
    idle[PAUSE] = difference((starts[:1], ends[-1:]), busy.recorded)
    lanes: dict[str, dict[str, Union]] = {"idle": idle}
    for name, times in (
        ("copy", busy.copy),
        ("communication", busy.communication),
        ("compute", busy.compute),
    ):
        lanes[name] = {name: times}
    edges, slot_ns = _edges(
        [times for parts in lanes.values() for times in parts.values()],
        axis,
        resolution,
    )
    length = np.maximum(np.diff(edges), 1)
    return {
        lane: TimelineStack(
            edges,
            tuple(
                StackLayer(
                    IDLE_CAUSES.get(part, part),
                    overlap_ns(edges[:-1], edges[1:], times) / length,
                    ACTIVITY_STYLES[part],
                )
                for part, times in parts.items()
                if lane != "idle" or len(times[0])
            ),
            slot_ns,
        )
        for lane, parts in lanes.items()
    }


def _edges(
    times: list[Union], axis: TimeAxis, resolution: Resolution
) -> tuple[Ints, float | None]:
    """Return the edges of steps within the axis, and the length of their slots.

    There is a length only if they are slots.
    """
    changes = np.unique(np.concatenate([side for union in times for side in union]))
    changes = changes[(changes > axis.start_ns) & (changes < axis.end_ns)]
    slots = resolution.slots_within(axis.end_ns - axis.start_ns, axis.length_ns)
    if len(changes) < resolution.steps_per_slot * slots:
        return np.concatenate([[axis.start_ns], changes, [axis.end_ns]]).astype(
            np.int64
        ), None
    edges = np.linspace(axis.start_ns, axis.end_ns, slots + 1).astype(np.int64)
    return np.unique(edges), axis.length_ns / resolution.slots
