"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ebbtide.units import bytes_text, count_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.summary import Summary
    from ebbtide.analysis.metrics.windows import Window, Windows
    from ebbtide.profiler.trace import Trace


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are figures."""
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number else "left")
    for row in rows:
        grid.add_row(*map(escape, row))
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
    rows = [["iteration", ms_text(summary.iteration_ms), *[""] * 6]]
    for phase in summary.phases:
        share = "-" if phase.share is None else f"{100 * phase.share:.0f} %"
        sizes = (phase.peak_bytes, phase.min_free_bytes, phase.h2d_bytes, phase.d2h_bytes)
        rows.append(
            [phase.phase, ms_text(phase.median_ms), ms_text(phase.p95_ms), share, *(bytes_text(size) for size in sizes)]
        )
    table(
        f"Medians over {counted} iterations (the largest peaks of all stand below)",
        ["phase", "time", "p95", "share", f"peak {pool}", "free at peak", "h2d", "d2h"],
        rows,
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
_MOST_ROWS = 12


def print_windows(trace: Trace, found: Windows) -> None:
    least, capacity = bytes_text(found.min_bytes), bytes_text(found.capacity_bytes)
    typer.echo(f"{trace.path}: windows with at least {least} free, of {capacity}")
    if not found.windows:
        too_much = found.capacity_bytes is not None and found.min_bytes > found.capacity_bytes
        typer.echo(f"never {least} free: {'the device is smaller' if too_much else 'try a smaller --min-bytes'}")
        return
    if found.guaranteed:
        _window_table("Free in every iteration at the same place (times within a median iteration)", found.guaranteed)
    elif any(window.iteration is not None for window in found.windows):
        typer.echo(f"no place of the iteration has {least} free in every iteration")
    longest = sorted(found.windows, key=lambda w: w.start_ms - w.end_ms)[:_MOST_ROWS]
    title = f"The {len(longest)} longest of {len(found.windows)} windows (--json has all)"
    _window_table(title if len(longest) < len(found.windows) else "All windows", longest)
    typer.echo(
        "fits: parameters whose optimizer state (12 B each) fits there; streams: how many could come, be updated and go"
    )
    if all(window.h2d_idle_share is None and window.d2h_idle_share is None for window in found.windows):
        typer.echo("no GPU link was recorded: how idle it was is not known")


def _window_table(title: str, windows: list[Window]) -> None:
    columns = ["phase", "iteration", "from", "to", "length", "least free", "h2d idle", "d2h idle", "fits", "streams"]
    table(title, columns, [_window_row(window) for window in windows])


def _window_row(window: Window) -> list[str]:
    shares = (window.h2d_idle_share, window.d2h_idle_share)
    every = "every" if window.phase else "-"
    return [
        window.phase or "-",
        every if window.iteration is None else str(window.iteration),
        ms_text(window.start_ms),
        ms_text(window.end_ms),
        ms_text(window.end_ms - window.start_ms),
        bytes_text(window.free_bytes),
        *("-" if share is None else f"{100 * share:.0f} %" for share in shares),
        count_text(window.resident_params),
        count_text(window.streamed_params),
    ]
