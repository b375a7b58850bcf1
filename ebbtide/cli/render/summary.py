"""Prints the summary of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.gpu import print_gpu
from ebbtide.cli.render.rank_differences import print_differences
from ebbtide.cli.render.storage import print_storage
from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, ms_text, range_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.summary import PhaseSummary, Summary
    from ebbtide.profiler.trace import Trace


def print_summary(trace: Trace, summary: Summary) -> None:
    """Print time, memory, link use and the state of the GPUs per phase, and the peak of each memory pool."""
    from ebbtide.analysis.metrics.devices import capacity_name, free_memory_text
    from ebbtide.analysis.metrics.missing import no_iterations

    counted = summary.iterations - summary.warmup_iterations
    left_out = f", the first {summary.warmup_iterations} left out as warm-up" if summary.warmup_iterations else ""
    echo(f"{trace.path}: {summary.iterations} iterations, ranks: {summary.ranks}{left_out}")
    for about_line in summary.about:
        echo(f"  {about_line}")
    pool = summary.memory.pool or "memory"
    whole = summary.iteration_range
    spread = "" if whole is None else range_text(whole.low_ms, whole.high_ms)
    rows = [["iteration", ms_text(summary.iteration_ms), spread, *[""] * 5]]
    for phase in summary.phases:
        share = "-" if phase.share is None else f"{100 * phase.share:.0f} %"
        sizes = (phase.peak_bytes, phase.min_free_bytes, phase.h2d_bytes, phase.d2h_bytes)
        rows.append(
            [
                phase.phase,
                ms_text(phase.median_ms),
                _spread(summary, phase),
                share,
                *(bytes_text(size) for size in sizes),
            ]
        )
    if counted:
        slowest = ", times of the slowest rank (--rank N for one rank)" if summary.ranks > 1 else ""
        print_table(
            f"Medians over {counted} iterations{slowest} (highest peaks: see below)",
            [
                "phase",
                "time",
                "range" if summary.is_predicted else "p95",
                "share",
                f"peak {pool}",
                "free at peak",
                "h2d",
                "d2h",
            ],
            rows,
        )
    else:
        echo(f"figures are of the whole trace: {no_iterations(trace)}")
        _print_totals(trace, summary)
    if counted and summary.free_pool is not None and summary.memory.capacity_bytes is not None:
        echo(f"free at peak: {free_memory_text(trace)}\n")
    if summary.gpu is not None:
        print_gpu(summary.gpu)
    print_storage(summary.storage)
    print_differences(summary.rank_differences)
    peaks = [[name, bytes_text(peak)] for name, peak in summary.memory.pools.items()]
    print_table(
        "Memory, whole trace",
        ["pool", "peak"],
        [[capacity_name(trace), bytes_text(summary.memory.capacity_bytes)], *peaks],
    )
    copies = [
        [direction, f"{moved.count:,}", bytes_text(moved.bytes), ms_text(moved.busy_ms)]
        for direction, moved in summary.transfers.items()
        if moved.count is not None
    ]
    if copies:
        print_table("Copies, whole trace", ["direction", "copies", "bytes", "busy"], copies)
    for remark in summary.remarks:
        echo(remark)
    for note in trace.notes:
        echo(f"note: {note}")


def _spread(summary: Summary, phase: PhaseSummary) -> str:
    """Return the 95th percentile of measured times; of predicted ones, which repeat, the range."""
    return range_text(phase.low_ms, phase.high_ms) if summary.is_predicted else ms_text(phase.p95_ms)


def _print_totals(trace: Trace, summary: Summary) -> None:
    """Print the figures of a whole trace that were recorded."""
    from ebbtide.analysis.metrics.devices import free_memory_text

    totals = summary.totals
    if totals is None or totals.span_ms is None:
        return
    several = ", all ranks" if summary.ranks > 1 else ""
    rows = [
        ["from first to last record", ms_text(totals.span_ms)],
        [f"least free memory ({free_memory_text(trace)})", bytes_text(totals.min_free_bytes)],
        [f"bytes to the device (h2d){several}", bytes_text(totals.h2d_bytes)],
        [f"bytes to the host (d2h){several}", bytes_text(totals.d2h_bytes)],
        [f"GPU: compute{several}", ms_text(totals.compute_ms)],
        [f"GPU: communication{several}", ms_text(totals.communication_ms)],
        [f"GPU: copies{several}", ms_text(totals.copy_ms)],
        [f"GPU: idle{several}", ms_text(totals.idle_ms)],
    ]
    missing = bytes_text(None)
    print_table("Whole trace", ["figure", "value"], [row for row in rows if row[1] != missing])
