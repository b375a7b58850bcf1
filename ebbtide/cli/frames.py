"""`ebbtide tables`: a trace as files for pandas, R and spreadsheets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import size


def tables(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write.")],
    format: Annotated[str, typer.Option(help="csv or parquet.")] = "csv",
    min_bytes: Annotated[str, typer.Option(help="How much must be free in a window, e.g. 500MB.")] = "1GiB",
    force: Annotated[bool, typer.Option(help="Replace the folder if it holds tables and nothing else.")] = False,
) -> None:
    """Write the tables of a trace, a file each: phases, memory, link, transfers, ops, iterations and windows."""
    least = size(min_bytes)

    from ebbtide.analysis.frames import FORMATS, write_tables
    from ebbtide.profiler.trace import open_trace

    if format not in FORMATS:
        raise typer.BadParameter(f"{format!r} is not a format: choose {' or '.join(FORMATS)}")
    for line in write_tables(open_trace(trace), output, format, least, force):
        typer.echo(f"ebbtide: {line}", err=True)
    typer.echo(f"ebbtide: {output}", err=True)
