"""Prints the use of the link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import bytes_text, ms_text, rate_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.link import LinkUse
    from ebbtide.profiler.trace import Trace


def print_link(trace: Trace, link: LinkUse) -> None:
    """Print the use of the link per phase and direction, and all copies by kind of host memory."""
    from ebbtide.analysis.metrics.missing import no_iterations, no_link_use

    for entry in link.ranks:
        if entry.source is None:
            continue
        peak = f", peak {rate_text(entry.peak_bytes_per_s)} per direction" if entry.peak_bytes_per_s else ""
        echo(f"rank {entry.rank}: from {entry.source}{peak}")
        for direction, count in entry.rejected_samples.items():
            if count:
                echo(f"  {count} samples of {direction} are above the peak rate of the link: left out")
    rows = [
        [
            use.phase or "whole trace",
            use.direction,
            bytes_text(use.bytes),
            ms_text(use.busy_ms),
            ms_text(use.both_ms),
            rate_text(use.mean_bytes_per_s),
            rate_text(use.busy_bytes_per_s),
            "-" if use.share_of_peak is None else f"{100 * use.share_of_peak:.1f} %",
        ]
        for use in link.phases
        if use.bytes is not None or use.busy_ms is not None
    ]
    if not rows:
        ranks, has_samples = [entry.rank for entry in link.ranks], any(entry.source for entry in link.ranks)
        echo(f"{trace.path}: {no_link_use(trace, ranks, has_samples)}")
        return
    columns = [
        "phase",
        "direction",
        "bytes",
        "busy",
        "both directions",
        "mean rate",
        "rate while busy",
        "of peak",
    ]
    if link.phases[0].phase is None:
        echo(f"figures are of the whole trace: {no_iterations(trace)}")
        title = "Use of the link"
    else:
        title = "Use of the link (medians per iteration)"
    print_table(title, columns, rows[:MAX_ROWS])
    print_omitted(len(rows))
    kinds = [
        [
            kind.direction,
            kind.host_memory or "not known",
            f"{kind.count:,}",
            bytes_text(kind.bytes),
            ms_text(kind.busy_ms),
            rate_text(kind.busy_bytes_per_s),
        ]
        for kind in link.copies
    ]
    if kinds:
        columns = ["direction", "host memory", "copies", "bytes", "busy", "rate while busy"]
        print_table("All copies of the trace by kind of host memory", columns, kinds[:MAX_ROWS])
        print_omitted(len(kinds))
