"""The tables of the use of the link."""

from ebbtide.analysis.metrics.link import LinkUse
from ebbtide.analysis.metrics.missing import no_iterations, no_link_use
from ebbtide.analysis.tables.table import (
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
from ebbtide.units import rate_text

_SOURCE = "ebbtide summary --by link --json"


def link_table(link: LinkUse, rank: int | None = None) -> Table:
    """Return the table of the link by phase and direction, of one rank, or of all if
    None."""
    rows = [
        use
        for use in link.phases
        if rank in (None, use.rank) and (use.bytes, use.busy_ms) != (None, None)
    ]
    columns = (
        text("phase", lambda use: use.phase or "whole trace"),
        text("direction", "direction"),
        size("bytes", "bytes"),
        ms("busy", "busy_ms"),
        ms("both at once", "both_ms"),
        rate("mean rate", "mean_bytes_per_s"),
        rate("rate while busy", "busy_bytes_per_s"),
        share("of peak", "share_of_peak", digits=1),
    )
    note = (
        "Over the whole trace."
        if rows and rows[0].phase is None
        else "Medians over the steady iterations."
    )
    return Table("link", "Use of the link", columns, rows, note, _SOURCE)


def copies_table(link: LinkUse, rank: int | None = None) -> Table:
    """Return the table of all copies by direction and kind of host memory, of one rank,
    or of all if None."""
    columns = (
        text("direction", "direction"),
        text("host memory", "host_memory"),
        number("copies", "count"),
        size("bytes", "bytes"),
        ms("busy", "busy_ms"),
        rate("rate while busy", "busy_bytes_per_s"),
    )
    rows = [kind for kind in link.copies if rank in (None, kind.rank)]
    return Table(
        "copies",
        "Copies by direction and host memory",
        columns,
        rows,
        "Over the whole trace.",
        _SOURCE,
    )


def link_view(trace: Trace, link: LinkUse) -> View:
    """Return the use of the link per phase and direction, and all copies.

    Copies are by kind of host memory.
    """
    for entry in link.ranks:
        if entry.source is None:
            continue
        peak = (
            f", peak {rate_text(entry.peak_bytes_per_s)} per direction"
            if entry.peak_bytes_per_s
            else ""
        )
        yield f"rank {entry.rank}: from {entry.source}{peak}"
        for direction, samples in entry.rejected_samples.items():
            if samples:
                yield (
                    f"  {samples} samples of {direction} are above the peak rate of "
                    "the link: left out"
                )
    table = link_table(link)
    if not table:
        ranks, has_samples = (
            [entry.rank for entry in link.ranks],
            any(entry.source for entry in link.ranks),
        )
        yield f"{trace.path}: {no_link_use(trace, ranks, has_samples)}"
        return
    if link.phases[0].phase is None:
        yield f"figures are of the whole trace: {no_iterations(trace)}"
    yield table
    yield copies_table(link)
