"""Builds the tables of the page on the activity of the GPU: the figures that `ebbtide activity` prints."""

from __future__ import annotations

from ebbtide.analysis.metrics.activity.activity import GpuActivity
from ebbtide.analysis.metrics.activity.idle_causes import CAUSE_TEXTS
from ebbtide.analysis.report.columns import (
    ReportTable,
    count_column,
    ms_column,
    share_column,
    text_column,
    us_column,
)
from ebbtide.analysis.report.tables import first_rows
from ebbtide.units import ms_text

_MAX_KERNELS = 20
_ALL_KERNELS = "ebbtide activity --json has more"
_KINDS = {"compute": "compute_ms", "communication": "communication_ms", "copy": "copy_ms", "idle": "idle_ms"}


def activity_tables(activity: GpuActivity) -> list[ReportTable]:
    """Return the tables of phases, of the whole trace, of the causes of time without compute, of kernels and of waiting
    in collectives, as far as there are any; none where kernels were not recorded."""
    total = activity.total
    if total.span_ms is None:
        return []
    tables = []
    phases = [phase for phase in activity.phases if phase.compute_ms is not None]
    if phases:
        columns = [text_column("phase", [phase.phase for phase in phases])]
        columns += [ms_column(kind, [getattr(phase, key) for phase in phases]) for kind, key in _KINDS.items()]
        note = "Medians over the steady iterations. A kernel belongs to the phase that launched it; kinds may overlap."
        tables.append(ReportTable("activity", "Each phase in an iteration", tuple(columns), note))
    span_ms = total.span_ms or 1.0
    times = {kind: getattr(total, key) for kind, key in _KINDS.items()}
    shares = [None if time_ms is None else time_ms / span_ms for time_ms in times.values()]
    note = f"From the first to the last activity: {ms_text(total.span_ms)}."
    if total.communication_overlap_share is not None:
        note += f" Compute runs during {100 * total.communication_overlap_share:.0f} % of the communication."
    columns = [text_column("activity", times), ms_column("time", times.values()), share_column("share", shares)]
    tables.append(ReportTable("activity-total", "Whole trace", tuple(columns), note))
    causes = {cause: time_ms for cause, time_ms in activity.without_compute.items() if time_ms}
    if causes:
        columns = [
            text_column("cause", [CAUSE_TEXTS[cause] for cause in causes]),
            ms_column("time", causes.values()),
            share_column("share", [time_ms / span_ms for time_ms in causes.values()]),
        ]
        tables.append(ReportTable("causes", "Time without compute", tuple(columns), "Over the whole trace."))
    return [*tables, *_kernel_tables(activity)]


def _kernel_tables(activity: GpuActivity) -> list[ReportTable]:
    kernels, cut = first_rows(activity.kernels, _MAX_KERNELS, _ALL_KERNELS)
    columns = [
        text_column("kernel", [kernel.name for kernel in kernels]),
        text_column("kind", [kernel.kind for kernel in kernels]),
        count_column("runs", [kernel.count for kernel in kernels]),
        ms_column("time", [kernel.time_ms for kernel in kernels]),
        us_column("mean", [kernel.mean_us for kernel in kernels]),
        share_column("share", [kernel.share for kernel in kernels]),
    ]
    note = "Over the whole trace."
    if activity.launches is not None:
        launches = activity.launches
        note += (
            f" Compute kernels begin {launches.median_delay_us:,.0f} us after their launch (median; 95 %: "
            f"{launches.p95_delay_us:,.0f} us), with {launches.median_queued:,.0f} more launched and not begun (95 %: "
            f"{launches.p95_queued:,.0f})."
        )
    tables = [ReportTable("kernels", "Kernels with most time", tuple(columns), note, cut)]
    if activity.collectives is not None:
        waits = activity.collectives.waits
        columns = [
            count_column("rank", [wait.rank for wait in waits]),
            ms_column("waited", [wait.wait_ms for wait in waits]),
            count_column("came last", [wait.last for wait in waits]),
        ]
        title = f"Waiting for other ranks in {activity.collectives.count:,} collectives"
        tables.append(ReportTable("collectives", title, tuple(columns), "Over the whole trace."))
    return tables
