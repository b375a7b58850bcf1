"""`ebbtide merge`: join the traces of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Force


@command(
    "Record", 3, examples=("merge host1.ebb host2.ebb -o job.ebb", "merge host1.ebb host2.ebb -o job.ebb --align start")
)
def merge(
    traces: Annotated[list[Path], typer.Argument(metavar="RUN.ebb...", help="Traces of one job, one per host.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="RUN.ebb", help="Trace to write.")],
    align: Annotated[
        str | None,
        typer.Option(
            metavar="start|RUN.ebb",
            help="Move traces without a common clock so that all begin with the first one (start) or with RUN.ebb.",
            show_default="use their clocks, by which they must overlap",
        ),
    ] = None,
    force: Force = False,
) -> None:
    """Join the traces that the hosts of one job recorded into one trace, on one clock."""
    from ebbtide.profiler.trace import open_trace
    from ebbtide.profiler.trace.merge import merge as merge_traces
    from ebbtide.profiler.trace.trace import next_commands

    merged = merge_traces([open_trace(path) for path in traces], output, force, align)
    typer.echo(f"ebbtide: {next_commands(merged)}", err=True)
