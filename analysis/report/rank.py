"""Collects what the page shows of one rank: timeline, windows, sub-steps, iterations, link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.metrics.devices import free_memory_text
from ebbtide.analysis.metrics.holders.holders import holders_at
from ebbtide.analysis.metrics.holders.stack_tree import stack_tree
from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.link import LinkUse
from ebbtide.analysis.metrics.ranks.selection import ShownRank
from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
from ebbtide.analysis.metrics.windows import Windows, find_windows
from ebbtide.analysis.report.activity_tables import activity_tables
from ebbtide.analysis.report.chart_panels import ChartPanel
from ebbtide.analysis.report.chart_stacks import ChartLanes
from ebbtide.analysis.report.columns import ReportTable
from ebbtide.analysis.report.holders_table import holders_table
from ebbtide.analysis.report.stack_graph import stack_graph
from ebbtide.analysis.report.tables import iteration_table, window_tables
from ebbtide.analysis.report.timeline import timeline_json
from ebbtide.analysis.report.timeline_content import DetailLimits, timeline_content
from ebbtide.analysis.report.transfer_tables import link_tables, substep_tables
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text


@dataclass(frozen=True)
class RankView:
    """Content of the page on one rank.

    Attributes:
        rank: The rank.
        reason: Why it is shown; empty where all ranks are.
        timeline: Argument of Bokeh.embed.embed_item; None where nothing was recorded that a timeline could show.
        unit: Unit of the time axis.
        panels: Panels of the timeline, whose lines the page lists.
        lanes: Lanes of activity of the timeline, whose areas the page lists; None where there are none.
        timeline_notes: Remarks on the timeline.
        holders: Table of the holders of memory at its peak; None where they are not known.
        stacks: Graph of the call stacks that hold memory at its peak, as SVG; None where they were not recorded.
        windows: Tables of windows.
        windows_line: What the windows are, or why there are none.
        activity: Tables of the GPU's activity; empty where kernels were not recorded.
        steps: Tables of sub-steps; empty where they were not recorded.
        iterations: Table of iterations; None where there are none.
        link: Tables of the link.
    """

    rank: int
    reason: str
    timeline: dict[str, Any] | None
    unit: str
    panels: Sequence[ChartPanel]
    lanes: ChartLanes | None
    timeline_notes: Sequence[str]
    holders: ReportTable | None
    stacks: str | None
    windows: list[ReportTable]
    windows_line: str
    activity: list[ReportTable]
    steps: list[ReportTable]
    iterations: ReportTable | None
    link: list[ReportTable]


def rank_view(
    trace: Trace, shown: ShownRank, iterations: Iterations, link: LinkUse, min_bytes: int, limits: DetailLimits
) -> RankView:
    """Collect the content of the page on one rank.

    Args:
        trace: The trace.
        shown: The rank, and why it is shown.
        iterations: Times of all iterations.
        link: Link use of all ranks.
        min_bytes: Least free memory of a window, bytes.
        limits: Limits of detail.
    """
    rank = shown.rank
    windows = find_windows(trace, min_bytes, [rank])
    content = timeline_content(trace, rank, windows if windows.windows else None, limits)
    steps = sub_steps(trace, [rank])
    tree = stack_tree(trace, rank)
    return RankView(
        rank=rank,
        reason=shown.reason,
        timeline=timeline_json(content) if content else None,
        unit=content.axis.unit if content else "s",
        panels=content.panels if content else (),
        lanes=content.activity if content else None,
        timeline_notes=content.notes if content else (),
        holders=holders_table(holders_at(trace, rank)),
        stacks=stack_graph(tree) if tree else None,
        windows=window_tables(windows, free_memory_text(trace), limits.rows) if windows.windows else [],
        windows_line=_windows_line(trace, windows),
        activity=activity_tables(gpu_activity(trace, rank)),
        steps=substep_tables(steps, limits.rows) if steps.steps else [],
        iterations=iteration_table(iterations, rank, limits.rows),
        link=link_tables(link, rank),
    )


def _windows_line(trace: Trace, windows: Windows) -> str:
    if windows.missing:
        return windows.missing[0]
    threshold, free = bytes_text(windows.min_bytes), free_memory_text(trace)
    if not windows.windows:
        return f"{threshold} are never free: try a smaller `--min-bytes`. Free memory is {free}."
    line = (
        f"Times with at least {threshold} of {bytes_text(windows.capacity_bytes)} free (`--min-bytes`); free memory is "
        f"{free}"
    )
    if not windows.guaranteed and any(window.iteration is not None for window in windows.windows):
        return f"{line}. No position in the iteration has that in every iteration."
    return f"{line}."
