"""Prints the activity of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.analysis.metrics.activity.idle_causes import CAUSE_TEXTS
from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.activity.activity import GpuActivity
    from ebbtide.profiler.trace import Trace

_MAX_KERNELS = 10
_MAX_NAME = 70


def print_activity(trace: Trace, activity: GpuActivity) -> None:
    """Print the activity per phase and in total, the causes of time without compute, kernels and collectives."""
    total = activity.total
    if len(trace.ranks) > 1:
        echo(f"rank {activity.rank} of {len(trace.ranks)} ranks (--rank N for another one)")
    for line in activity.missing:
        echo(f"{trace.path}: {line}")
    if total.span_ms is None:
        return
    rows = [
        [p.phase, ms_text(p.compute_ms), ms_text(p.communication_ms), ms_text(p.copy_ms), ms_text(p.idle_ms)]
        for p in activity.phases
        if p.compute_ms is not None
    ]
    columns = ["phase", "compute", "communication", "copy", "idle"]
    if rows:
        print_table("GPU time per iteration (medians; kinds may overlap)", columns, rows)
    parts = [total.compute_ms, total.communication_ms, total.copy_ms, total.idle_ms]
    whole = [
        ["time", *map(ms_text, parts)],
        ["share", *(_share(ms, total.span_ms) for ms in parts)],
    ]
    print_table(f"Whole trace: {ms_text(total.span_ms)}", ["", *columns[1:]], whole)
    if total.communication_overlap_share is not None:
        echo(f"compute runs during {100 * total.communication_overlap_share:.0f} % of the communication\n")
    causes = [
        [CAUSE_TEXTS[cause], ms_text(ms), _share(ms, total.span_ms)]
        for cause, ms in activity.without_compute.items()
        if ms
    ]
    if causes:
        print_table("Time without compute, whole trace", ["cause", "time", "share"], causes)
    if activity.launches is not None:
        launches = activity.launches
        echo(
            f"compute kernels begin {launches.median_delay_us:,.0f} us after their launch (median; 95 %: "
            f"{launches.p95_delay_us:,.0f} us), with {launches.median_queued:,.0f} more launched and not begun (95 %: "
            f"{launches.p95_queued:,.0f})\n"
        )
    kernels = [
        [_short(k.name), f"{k.count:,}", ms_text(k.time_ms), f"{k.mean_us:,.1f} us", f"{100 * k.share:.1f} %"]
        for k in activity.kernels[:_MAX_KERNELS]
    ]
    print_table("Kernels with most time, whole trace", ["kernel", "runs", "time", "mean", "share"], kernels)
    if activity.collectives is not None:
        waits = [[str(w.rank), ms_text(w.wait_ms), f"{w.last:,}"] for w in activity.collectives.waits]
        title = f"Waiting for other ranks in {activity.collectives.count:,} collectives"
        print_table(title, ["rank", "waited", "came last"], waits)


def _share(ms: float | None, span_ms: float) -> str:
    return "-" if ms is None or not span_ms else f"{100 * ms / span_ms:.1f} %"


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 2] + " …"
