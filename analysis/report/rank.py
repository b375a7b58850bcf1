"""Collects what the page shows of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ebbtide.analysis.metrics.iteration_stats import Iterations
from ebbtide.analysis.metrics.iterations import on_device_clock
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import LinkUse
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.metrics.ranks.rank_series import phase_series
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.report.page_panels import Lanes
from ebbtide.analysis.report.timeline import timeline_json
from ebbtide.analysis.report.timeline_content import DetailLimits, timeline_content
from ebbtide.analysis.tables import link as link_tables
from ebbtide.analysis.tables.activity import activity_tables, path_table
from ebbtide.analysis.tables.iterations import iteration_table
from ebbtide.analysis.tables.memory import holder_tables, holders_text
from ebbtide.analysis.tables.substeps import step_table, subgroup_table
from ebbtide.analysis.tables.table import Table
from ebbtide.analysis.tables.windows import longest_table, recurring_table, windows_note
from ebbtide.analysis.timeline.panels import TimelinePanel
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.profiler.trace import Trace

_MAX_SUBGROUP_ROWS = 60


@dataclass(frozen=True)
class Section:
    """A section of tables on one rank."""

    name: str  # First part of its anchor.
    title: str
    tables: Sequence[Table]
    text: str = ""  # What the tables show, or why there are none.


@dataclass(frozen=True)
class RankView:
    """Content of the page on one rank."""

    rank: int
    reason: str  # Why it is shown; empty where all ranks are.
    # Argument of Bokeh.embed.embed_item; None where nothing was recorded that a
    # timeline could show.
    timeline: dict[str, Any] | None
    unit: str  # Unit of the time axis.
    # Panels of the timeline, whose lines the page lists.
    panels: Sequence[TimelinePanel]
    lanes: Lanes  # Lanes of activity of the timeline, whose areas the page lists.
    timeline_notes: Sequence[str]  # Remarks on the timeline.
    sections: Sequence[Section]  # Sections of tables; only those with content.


def rank_view(
    metrics: JobMetrics,
    shown: ShownRank,
    iterations: Iterations,
    link: LinkUse,
    min_bytes: int,
    limits: DetailLimits,
) -> RankView:
    """Collect the content of the page on one rank."""
    trace, rank = metrics.trace, shown.rank
    windows = metrics.windows(min_bytes, [rank])
    # The timeline of a recording is on the clock of the host, the tables on the clock
    # of the GPU.
    timeline = on_device_clock(trace) if is_predicted(trace) else trace
    drawn = find_windows(timeline, min_bytes, [rank])
    content = timeline_content(timeline, rank, drawn if drawn.windows else None, limits)
    steps = metrics.substeps([rank])
    holders, path = metrics.holders(rank), metrics.rank(rank).critical_path
    substeps = (
        step_table(steps).first(limits.rows),
        subgroup_table(steps).first(min(limits.rows, _MAX_SUBGROUP_ROWS)),
    )
    memory = Section("holders", "Holders of memory", ())
    if holders is not None and any(one.category for one in holders.holders):
        memory = replace(
            memory,
            tables=_with_rows(*holder_tables(holders)),
            text=f"{holders_text(holders)}.",
        )
    sections = (
        memory,
        Section(
            "windows",
            "Windows of free memory",
            _with_rows(recurring_table(windows), longest_table(windows)),
            windows_note(trace, windows),
        ),
        Section(
            "activity",
            "Activity of the GPU",
            [
                *activity_tables(metrics.rank(rank).activity),
                *([path_table(path)] if path is not None else []),
            ],
        ),
        Section("steps", "Sub-steps", _with_rows(*substeps)),
        Section(
            "iterations",
            "Iterations",
            _with_rows(iteration_table(iterations, rank).first(limits.rows)),
        ),
        Section(
            "link",
            "Link",
            _with_rows(
                link_tables.link_table(link, rank), link_tables.copies_table(link, rank)
            ),
        ),
    )
    return RankView(
        rank=rank,
        reason=shown.reason,
        timeline=timeline_json(content) if content else None,
        unit=content.axis.unit if content else "s",
        panels=content.panels if content else (),
        lanes=content.lanes if content else {},
        timeline_notes=content.notes if content else (),
        sections=[section for section in sections if section.tables or section.text],
    )


def _with_rows(*tables: Table) -> list[Table]:
    return [table for table in tables if table]


# All ranks are shown of a job with at most this many.
MAX_RANKS = 8
# Of a larger job: this many ranks that differ, each with another cause, beside the
# slowest, median and fastest one.
_MAX_DIFFERING = 3


class ShownRank(NamedTuple):
    """A rank that is shown in detail, and why; empty where all ranks are shown."""

    rank: int
    reason: str


def shown_ranks(trace: Trace, asked: Sequence[int] = ()) -> list[ShownRank]:
    """Return the ranks to show in detail. Of a job with up to 8 ranks: those asked for,
    or all. Of a larger one: those asked for; the slowest, the median and the fastest
    one, by the time of all phases; and one of each cause of a difference. Raises
    TraceError where the trace does not have one that is asked for."""
    for rank in asked:
        trace.rank(rank)
    if len(trace.ranks) <= MAX_RANKS:
        return [ShownRank(rank, "") for rank in dict.fromkeys(asked or trace.ranks)]
    reasons: dict[int, list[str]] = {rank: ["asked for"] for rank in asked}
    medians = {
        rank: median_or_none(phase_series(trace, rank).columns["phases_ms"])
        for rank in trace.ranks
    }
    by_time = [
        rank
        for _, rank in sorted(
            (ms, rank) for rank, ms in medians.items() if ms is not None
        )
    ]
    if by_time:
        chosen = {
            "slowest": by_time[-1],
            "median": by_time[len(by_time) // 2],
            "fastest": by_time[0],
        }
        for reason, rank in chosen.items():
            reasons.setdefault(rank, []).append(reason)
    causes: dict[str, int] = {}
    for difference in rank_differences(trace).differences:
        causes.setdefault(difference.cause, difference.ranks[0])
    for cause, rank in list(causes.items())[:_MAX_DIFFERING]:
        reasons.setdefault(rank, []).append(cause)
    return [ShownRank(rank, ", ".join(texts)) for rank, texts in reasons.items()] or [
        ShownRank(rank, "") for rank in trace.ranks[:MAX_RANKS]
    ]
