"""Prints what holds the memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ebbtide.cli.render.tables import MAX_ROWS, print_omitted, print_table
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.holders.holders import Holders
    from ebbtide.profiler.trace import Trace

_NOT_KNOWN = "not known"
_MAX_SITE_CHARS = 60


def print_holders(trace: Trace, result: Holders | None, at: str) -> None:
    """Print the holders of memory by category, and each of them with its module and call site.

    Args:
        trace: The trace.
        result: What holds the memory; None where no memory was recorded.
        at: The option `--at`.
    """
    from ebbtide.analysis.metrics.missing import NO_MEMORY

    if result is None:
        typer.echo(f"{trace.path}: {NO_MEMORY}")
        return
    moment = f"at its peak, {ms_text(result.t_ms)}" if at == "peak" else f"at {ms_text(result.t_ms)}"
    typer.echo(
        f"{trace.path}: {bytes_text(result.bytes)} of {result.device} {moment} after the start (pool {result.pool})"
    )

    def share(size: int) -> str:
        return f"{size / result.bytes:.1%}" if result.bytes else "-"

    categories = [[name or _NOT_KNOWN, bytes_text(size), share(size)] for name, size in result.by("category")]
    print_table("Holders by category", ["category", "bytes", "share"], categories)
    rows = [
        [
            holder.category or _NOT_KNOWN,
            holder.module or "-",
            _short(holder.site),
            bytes_text(holder.bytes),
            share(holder.bytes),
        ]
        for holder in result.holders
    ]
    print_table("Holders", ["category", "module", "call site", "bytes", "share"], rows[:MAX_ROWS])
    print_omitted(len(rows))


def _short(site: str | None) -> str:
    """Return a call site with the end of its path: `forward (.../model.py:20)`."""
    if site is None or len(site) <= _MAX_SITE_CHARS:
        return site or "-"
    function, parenthesis, path = site.rpartition(" (")
    return f"{function}{parenthesis}.../{path.rsplit('/', 1)[-1]}"[:_MAX_SITE_CHARS]
