"""Prints the sub-steps of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.storage import print_storage
from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.substeps.aggregate import SubStep
    from ebbtide.analysis.metrics.substeps.breakdown import SubSteps
    from ebbtide.profiler.trace import Trace


def print_steps(trace: Trace, steps: SubSteps) -> None:
    """Print the sub-steps of the update, and those of each subgroup if there are any."""
    from ebbtide.analysis.metrics.missing import NO_SUB_STEPS

    if not steps.steps:
        echo(f"{trace.path}: {NO_SUB_STEPS}")
        return
    order = "one after the other" if steps.tiles else "they overlap, so do not add their times"
    if steps.tiles and any(use.resource == "worker" for use in steps.resources):
        order += "; those on `worker` run in another process meanwhile"
    if steps.tiles and steps.storage:
        order += "; reads and writes are in flight meanwhile"
    echo(f"{trace.path}: sub-steps of an iteration, medians ({order})")
    busy = "; ".join(
        f"{use.phase}: {use.resource} {ms_text(use.median_ms)}{_share(use.share, ' ({})')}" for use in steps.resources
    )
    echo(f"busy: {busy}")
    columns = ["sub-step", "phase", "on", "time", "share", "count", "bytes", "h2d", "d2h", "rate", "waits"]
    columns.append(f"peak {steps.pool or 'memory'}")
    print_table(
        "Sub-steps (h2d, d2h: bytes copied meanwhile; rate: of the faster direction while copies run; waits: for which "
        "pageable copy)",
        columns,
        _step_rows(steps.steps),
    )
    print_omitted(len(steps.steps))
    print_storage(steps.storage)
    if steps.subgroups:
        columns.insert(1, "subgroup")
        print_table("By subgroup", columns, _step_rows(steps.subgroups, True))
        print_omitted(len(steps.subgroups))


def _step_rows(steps: Sequence[SubStep], by_subgroup: bool = False) -> list[list[str]]:
    return [
        [
            f"- {step.name}" if step.within else step.name,
            *([str(step.subgroup)] if by_subgroup else []),
            step.phase,
            step.resource,
            ms_text(step.median_ms),
            _share(step.share),
            f"{step.count:,.0f}",
            bytes_text(step.bytes),
            bytes_text(step.h2d.bytes),
            bytes_text(step.d2h.bytes),
            rate_text(max(side.busy_bytes_per_s or 0.0 for side in (step.h2d, step.d2h)) or None),
            step.waits_for or "",
            bytes_text(step.peak_bytes),
        ]
        for step in steps[:MAX_ROWS]
    ]


def _share(share: float | None, text: str = "{}") -> str:
    return "" if share is None else text.format(f"{100 * share:.0f} %")
