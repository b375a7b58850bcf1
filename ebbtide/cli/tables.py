"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ebbtide.analysis.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.summary import Summary
    from ebbtide.profiler.trace import Trace


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number else "left")
    for row in rows:
        grid.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(grid)


def print_summary(trace: Trace, summary: Summary) -> None:
    counted = summary.iterations - summary.warmup_iterations
    left_out = f", the first {summary.warmup_iterations} left out as warm-up" if summary.warmup_iterations else ""
    typer.echo(f"{trace.path}: {summary.iterations} iterations, ranks: {summary.ranks}{left_out}")
    for line in summary.about:
        typer.echo(f"  {line}")
    pool = summary.memory.pool or "memory"
    table(
        f"Per iteration (median of {counted})",
        ["phase", "median", "p95", "share", f"peak {pool}", "least free", "h2d", "d2h"],
        [
            [
                phase.phase,
                ms_text(phase.median_ms),
                ms_text(phase.p95_ms),
                "-" if phase.share is None else f"{100 * phase.share:.0f} %",
                bytes_text(phase.peak_bytes),
                bytes_text(phase.min_free_bytes),
                bytes_text(phase.h2d_bytes),
                bytes_text(phase.d2h_bytes),
            ]
            for phase in summary.phases
        ],
    )
    peaks = [[name, bytes_text(peak)] for name, peak in summary.memory.pools.items()]
    table(
        "Memory, whole trace",
        ["pool", "peak"],
        [["capacity", bytes_text(summary.memory.capacity_bytes)], *peaks],
    )
    for line in summary.remarks:
        typer.echo(line)
    for note in trace.notes:
        typer.echo(f"note: {note}")
