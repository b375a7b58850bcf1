"""The tables of the sub-steps of an update."""

from ebbtide.analysis.metrics.missing import NO_SUB_STEPS
from ebbtide.analysis.metrics.substeps.breakdown import SubStep, SubSteps
from ebbtide.analysis.tables.summary import storage_table
from ebbtide.analysis.tables.table import (
    Column,
    Table,
    View,
    ms,
    number,
    rate,
    share,
    size,
    text,
)
from ebbtide.profiler.trace import Trace
from ebbtide.units import ms_text

_SOURCE = "ebbtide summary --by substep --json"
_NOTE = (
    "h2d, d2h: bytes copied meanwhile; rate: of the faster direction while copies run; "
    "waits for: the pageable copy "
    "that holds up the host."
)


def step_table(steps: SubSteps) -> Table:
    """Return the table of sub-steps."""
    order = (
        "They follow each other"
        if steps.tiles
        else "They overlap: do not add their times"
    )
    note = f"Medians over the steady iterations. {order}. {_NOTE}"
    return Table(
        "steps",
        "Sub-steps of an iteration",
        _columns(steps.pool),
        steps.steps,
        note,
        _SOURCE,
    )


def subgroup_table(steps: SubSteps) -> Table:
    """Return the table of sub-steps by subgroup."""
    columns = (number("subgroup", "subgroup"), *_columns(steps.pool))
    subgroups = len({row.subgroup for row in steps.subgroups})
    return Table(
        "subgroups",
        f"By subgroup, {subgroups:,} in all",
        columns,
        steps.subgroups,
        None,
        _SOURCE,
    )


def steps_view(trace: Trace, steps: SubSteps) -> View:
    """Return the sub-steps of the update, and each subgroup's if there are any."""
    if not steps.steps:
        yield f"{trace.path}: {NO_SUB_STEPS}"
        return
    meanwhile = []
    if steps.tiles and any(use.resource == "worker" for use in steps.resources):
        meanwhile.append("those on `worker` run in another process meanwhile")
    if steps.tiles and steps.storage:
        meanwhile.append("reads and writes are in flight meanwhile")
    yield f"{trace.path}: sub-steps of an iteration" + (
        f" ({'; '.join(meanwhile)})" if meanwhile else ""
    )
    busy = [
        f"{use.phase}: {use.resource} {ms_text(use.median_ms)}"
        + ("" if use.share is None else f" ({100 * use.share:.0f} %)")
        for use in steps.resources
    ]
    yield f"busy: {'; '.join(busy)}"
    yield step_table(steps)
    yield storage_table(steps.storage)
    yield subgroup_table(steps)


def _columns(pool: str | None) -> tuple[Column, ...]:
    return (
        text(
            "sub-step",
            lambda step: (
                f"{step.name} (in {step.within})" if step.within else step.name
            ),
        ),
        text("phase", "phase"),
        text("on", "resource"),
        ms("time", "median_ms"),
        share("of phase", "share"),
        number("count", "count"),
        size("bytes", "bytes"),
        size("h2d", "h2d.bytes"),
        size("d2h", "d2h.bytes"),
        rate("rate", "busy_bytes_per_s"),
        share("pageable", _pageable_share),
        text("waits for", "waits_for"),
        size(f"peak {pool or 'memory'}", "peak_bytes"),
    )


def _pageable_share(step: SubStep) -> float | None:
    shares = (step.h2d.pageable_share, step.d2h.pageable_share)
    return max((share for share in shares if share is not None), default=None)
