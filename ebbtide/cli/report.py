"""`ebbtide report`: a trace as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import count, size


def report(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write: .html.")],
    min_bytes: Annotated[str, typer.Option(help="How much must be free in a window, e.g. 500MB.")] = "1GiB",
    rank: Annotated[
        int | None,
        typer.Option(help="Draw only this rank.", parser=count, metavar="N", show_default="the first 8"),
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the page if it exists.")] = False,
) -> None:
    """Explain a trace in one HTML page: findings, summary, timeline, windows, iterations. It needs no network."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{output} must end in .html")
    least = size(min_bytes)

    from ebbtide.analysis.findings import find
    from ebbtide.analysis.report import write_report
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    write_report(opened, find(opened), output, least, rank, force)
    typer.echo(f"ebbtide: {output}   open it in a browser", err=True)
