"""`ebbtide merge`: the traces of several hosts as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    traces: Annotated[list[Path], typer.Argument(metavar="RUN.ebb...", help="The traces of one job, one per host.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The trace to write.")],
    force: Annotated[bool, typer.Option(help="Replace a trace that stands at the output path.")] = False,
) -> None:
    """Merge the traces that each node of a job recorded, by rank, onto one clock."""
    from ebbtide.profiler.launch import next_commands
    from ebbtide.profiler.trace import open_trace
    from ebbtide.profiler.trace.merge import merge as merge_traces

    merged = merge_traces([open_trace(path) for path in traces], output, force)
    typer.echo(f"ebbtide: {next_commands(merged)}", err=True)
