"""The panels and lanes of a rank's timeline on the page.

Also remarks on how they are drawn.
"""

from collections.abc import Mapping

from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.timeline.activity import activity_lanes
from ebbtide.analysis.timeline.axis import SCREEN_STEPS, Resolution, TimeAxis
from ebbtide.analysis.timeline.link import link_panel
from ebbtide.analysis.timeline.memory import device_memory_panel, host_memory_panel
from ebbtide.analysis.timeline.panels import TimelinePanel, TimelineStack
from ebbtide.analysis.timeline.styles import HOST_MEMORY_DASHES
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

# Steps of all lanes: a few per dot of a screen.
_MAX_SLOTS = 8000

# Lanes of the activity of the GPU by name, from the top: shares of the time.
Lanes = Mapping[str, TimelineStack]


def page_lanes(
    trace: Trace, rank: int, axis: TimeAxis, max_points: int
) -> tuple[Lanes, list[str]]:
    """Return the lanes of a rank's GPU, and remarks on how they are drawn.

    There are none where kernels were not recorded. All areas have at most `max_points`
    together.
    """
    slots = max(1, min(max_points // 8, _MAX_SLOTS))
    lanes = activity_lanes(trace, rank, axis, Resolution(slots, steps_per_slot=1))
    slots_ns = {stack.slot_ns for stack in lanes.values() if stack.slot_ns is not None}
    notes = [
        f"activity: shares of {ms_text(slot_ns / 1e6)} each" for slot_ns in slots_ns
    ]
    return {name: lanes[name] for name in reversed(lanes)}, notes


def page_panels(
    trace: Trace, rank: int, axis: TimeAxis, max_points: int
) -> list[TimelinePanel]:
    """Return the panels of memory of the device and the host, and of the link, that
    data was recorded for.

    All lines have at most `max_points` together."""
    kinds = min(
        trace.transfers(rank)["host_memory"].nunique(dropna=False),
        len(HOST_MEMORY_DASHES),
    )
    line_count = trace.memory(rank)["pool"].nunique() + len(DIRECTIONS) * max(1, kinds)
    # An area takes half the bytes of a line: it has the times of the whole stack.
    resolution = Resolution(
        slots=max(1, min(max_points // line_count, SCREEN_STEPS)), steps_per_slot=1
    )
    panels = (
        device_memory_panel(trace, rank, axis, resolution),
        host_memory_panel(trace, rank, axis, resolution),
        link_panel(trace, rank, axis, resolution),
    )
    return [panel for panel in panels if panel is not None and not panel.is_empty]


def panel_notes(panel: TimelinePanel) -> list[str]:
    """Return remarks on how the lines of a panel are drawn."""
    notes = []
    if panel.reduction_note is not None:
        notes.append(
            f"{panel.reduction_note} (`ebbtide plot --iterations` draws every sample "
            "of some iterations)"
        )
    for direction, times in panel.above_peak_ns.items():
        notes.append(
            f"{len(times):,} × {direction} above the link's peak, which is impossible: "
            "marked at the edge"
        )
    return notes
