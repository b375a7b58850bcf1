"""`ebbtide tables`: write a trace as files for pandas, R and spreadsheets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Force, MinBytes, TraceFile, size


@command("Files", 2, examples=("tables run.ebb -o tables", "tables run.ebb -o tables --format parquet"))
def tables(
    trace: TraceFile,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Folder to write; --force replaces it only if it contains nothing but tables.",
        ),
    ],
    format: Annotated[str, typer.Option(metavar="csv|parquet", help="File format.")] = "csv",
    min_bytes: MinBytes = "1GiB",
    force: Force = False,
) -> None:
    """Write the tables of a trace as CSV or Parquet: phases, memory, link, gpu, transfers, ops, iterations, windows."""
    min_size = size(min_bytes)

    from ebbtide.analysis.export.tables import FORMATS, write_tables
    from ebbtide.profiler.trace import open_trace

    if format not in FORMATS:
        raise typer.BadParameter(f"{format!r} is not a format: choose {' or '.join(FORMATS)}")
    for note in write_tables(open_trace(trace), output, format, min_size, force):
        typer.echo(f"ebbtide: {note}", err=True)
    typer.echo(f"ebbtide: {output}", err=True)
