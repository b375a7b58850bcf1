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
    from ebbtide.analysis.windows import Window, Windows
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


# More rows than this are for a program (`--json`), not for a person.
_MOST_ROWS = 40


def print_windows(trace: Trace, found: Windows) -> None:
    least = bytes_text(found.min_bytes)
    capacity = bytes_text(found.capacity_bytes)
    typer.echo(f"{trace.path}: windows with at least {least} free, of {capacity}")
    columns = ["phase", "rank", "iteration", "from", "to", "length", "least free", "h2d idle", "d2h idle"]
    if found.guaranteed:
        rows = [_window_row(window) for window in found.guaranteed]
        table("Free in every iteration at the same place (times of a median iteration)", columns, rows)
    elif any(window.iteration is not None for window in found.windows):
        typer.echo(f"no place of the iteration has {least} free in every iteration")
    shown = found.windows[:_MOST_ROWS]
    more = len(found.windows) - len(shown)
    table(
        "All windows" + (f", the first {len(shown)}: --json has {more} more" if more else ""),
        columns,
        [_window_row(w) for w in shown],
    )
    if not found.windows:
        typer.echo(f"never {least} free: try a smaller --min-bytes")


def _window_row(window: Window) -> list[str]:
    return [
        window.phase or "-",
        str(window.rank),
        "every"
        if window.iteration is None and window.phase
        else "-"
        if window.iteration is None
        else str(window.iteration),
        ms_text(window.start_ms),
        ms_text(window.end_ms),
        ms_text(window.end_ms - window.start_ms),
        bytes_text(window.free_bytes),
        *("-" if share is None else f"{100 * share:.0f} %" for share in (window.h2d_idle_share, window.d2h_idle_share)),
    ]
