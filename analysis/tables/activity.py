"""The tables of the activity of a GPU, and of the critical path of an iteration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from ebbtide.analysis.metrics.activity.activity import GpuActivity, KernelTime
from ebbtide.analysis.metrics.activity.phase_activity import CAUSE_TEXTS
from ebbtide.analysis.tables.table import (
    Column,
    Table,
    View,
    ms,
    number,
    share,
    text,
    us,
)
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.critical_path.critical_path import (
        CriticalPath,
        RankPath,
    )

_QUALIFIER = re.compile(r"(?:\b\w+|\(anonymous namespace\))::")
_MAX_KERNELS = 20
# Unless all are asked for: this many kernels, and none of these tables.
_FIRST_KERNELS, _VERBOSE = 5, {"streams", "operators"}
_SOURCE = "ebbtide summary --by activity --json"
_WHOLE_TRACE = "Over the whole trace."
_KINDS = ("compute", "communication", "copy", "idle")
_STREAMS = (
    number("stream", "stream"),
    number("runs", "count"),
    ms("busy", "busy_ms"),
    ms("idle", "idle_ms"),
)


def activity_tables(activity: GpuActivity) -> list[Table]:
    """Return the tables of activity; none where kernels were not recorded.

    They show phases, the whole trace, the causes of time without compute, streams,
    kernels, operators, and waiting in collectives."""
    total = activity.total
    if total.span_ms is None:
        return []
    phases = [phase for phase in activity.phases if phase.compute_ms is not None]
    note = (
        "Medians over the steady iterations. A kernel belongs to the phase that "
        "launched it; kinds may overlap."
    )
    if activity.without_gradients_ms:
        note += (
            f" Of other, {ms_text(activity.without_gradients_ms)} are forwards without "
            "gradients."
        )
    columns = (text("phase", "phase"), *(ms(kind, f"{kind}_ms") for kind in _KINDS))
    tables = [
        Table(
            "activity", "GPU time of each phase in an iteration", columns, phases, note
        )
    ]
    times = [(kind, getattr(total, f"{kind}_ms")) for kind in _KINDS]
    note = f"From the first to the last activity: {ms_text(total.span_ms)}."
    if total.communication_overlap_share is not None:
        note += (
            f" Compute runs during {100 * total.communication_overlap_share:.0f} % of "
            "the communication."
        )
    causes = [
        (CAUSE_TEXTS[cause], time_ms)
        for cause, time_ms in activity.without_compute.items()
        if time_ms
    ]
    tables += [
        _shares(
            "activity-total",
            "GPU time, whole trace",
            "activity",
            times,
            total.span_ms,
            note,
        ),
        _shares(
            "causes",
            "Time without compute",
            "cause",
            causes,
            total.span_ms,
            _WHOLE_TRACE,
        ),
        Table(
            "streams",
            "Busy and idle time of each stream",
            _STREAMS,
            activity.streams,
            _WHOLE_TRACE,
            _SOURCE,
            8,
        ),
        _kernel_table(activity),
        _times(
            "operators",
            "Operators whose kernels take most time",
            text("operator", "name"),
            activity.operators,
            _WHOLE_TRACE,
        ),
    ]
    if activity.collectives is not None:
        columns = (
            number("rank", "rank"),
            ms("waited", "wait_ms"),
            number("came last", "last"),
        )
        title = f"Waiting for other ranks in {activity.collectives.count:,} collectives"
        tables.append(
            Table(
                "collectives", title, columns, activity.collectives.waits, _WHOLE_TRACE
            )
        )
    return [table for table in tables if table]


def activity_view(trace: Trace, activity: GpuActivity, verbose: bool = False) -> View:
    """Return the activity per phase and in total, with the causes of time without
    compute, kernels and collectives.

    `verbose`: also streams and operators, and more kernels."""
    for line in activity.missing:
        yield f"{trace.path}: {line}"
    tables = activity_tables(activity)
    if verbose:
        yield from tables
        return
    for table in tables:
        if table.name not in _VERBOSE:
            yield (
                replace(table, max_rows=_FIRST_KERNELS, source="-v")
                if table.name == "kernels"
                else table
            )
    if tables:
        yield "streams and operators: -v"


def _shares(
    name: str,
    title: str,
    label: str,
    rows: Sequence[tuple[str, float | None]],
    span_ms: float,
    note: str,
) -> Table:
    def part(row: tuple[str, float | None]) -> float | None:
        return None if row[1] is None or not span_ms else row[1] / span_ms

    columns = (
        text(label, itemgetter(0)),
        ms("time", itemgetter(1)),
        share("share", part, digits=1),
    )
    return Table(name, title, columns, rows, note)


def short_name(kernel: str) -> str:
    """Return the name of a kernel without return type, namespaces and arguments.

    Its template arguments stay.
    """
    depth, end = 0, len(kernel)
    if kernel.endswith(")"):
        for position in range(len(kernel) - 1, -1, -1):
            depth += (kernel[position] == ")") - (kernel[position] == "(")
            if not depth:
                end = position
                break
    return _QUALIFIER.sub("", kernel[:end].removeprefix("void ")) or kernel


def _times(
    name: str, title: str, label: Column, rows: Sequence[KernelTime], note: str
) -> Table:
    columns = (
        label,
        text("kind", "kind"),
        number("runs", "count"),
        ms("time", "time_ms"),
        us("min", "min_us"),
        us("median", "median_us"),
        us("max", "max_us"),
        share("share", "share", digits=1),
    )
    return Table(name, title, columns, rows, note, _SOURCE, _MAX_KERNELS)


def _kernel_table(activity: GpuActivity) -> Table:
    note = _WHOLE_TRACE
    if (launches := activity.launches) is not None:
        note += (
            f" Compute kernels begin {launches.median_delay_us:,.0f} us after their "
            "launch (median; 95 %: "
            f"{launches.p95_delay_us:,.0f} us), with {launches.median_queued:,.0f} "
            "more launched and not begun (95 %: "
            f"{launches.p95_queued:,.0f})."
        )
    kernel = text("kernel", lambda row: short_name(row.name))
    return _times("kernels", "Kernels with most time", kernel, activity.kernels, note)


_MAX_PATH_PARTS = 12
_PATH_SOURCE = "ebbtide summary --by activity --critical-path --json"


def path_line(path: CriticalPath) -> str:
    """Return the sentence on the length of a path and what it is made of."""
    device = path.device_ms
    others = {
        "in launches": "launch",
        "in other code of the host": "host",
        "in waits": "wait",
    }
    parts = ", ".join(
        f"{ms_text(path.kind_ms(kind))} {name}" for name, kind in others.items()
    )
    length = f"{ms_text(device)} of {ms_text(path.length_ms)} on the device"
    return f"Critical path of iteration {path.iteration}: {length}, {parts}."


def path_table(path: CriticalPath) -> Table:
    """Return the table of the parts of a path."""
    columns = (
        text("part", lambda row: short_name(row.name)),
        text("kind", "kind"),
        number("times", "count"),
        ms("time", "ms"),
        share(
            "share",
            lambda row: row.ms / path.length_ms if path.length_ms else None,
            digits=1,
        ),
    )
    note = (
        "By phase: "
        f"{', '.join(f'{phase} {ms_text(time)}' for phase, time in path.phases.items())}."
    )
    if len(path.ranks) > 1:
        note += (
            " By rank: "
            f"{', '.join(f'{rank}: {ms_text(time)}' for rank, time in path.ranks.items())}."
        )
    return Table(
        "critical-path",
        "Critical path by part",
        columns,
        path.parts,
        note,
        _PATH_SOURCE,
        _MAX_PATH_PARTS,
    )


def path_view(trace: Trace, result: RankPath) -> View:
    """Return the critical path of the median iteration, or why there is none."""
    if result.path is None:
        lines = result.activity.missing or [
            "no steady iteration was recorded as a whole"
        ]
        yield from (f"{trace.path}: {line}" for line in lines)
        return
    yield path_line(result.path)
    yield path_table(result.path)
