"""`ebbtide export`: a trace for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ENDINGS = (".json", ".json.gz")


def export(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write: .json or .json.gz.")],
    force: Annotated[bool, typer.Option(help="Replace the file if it exists.")] = False,
) -> None:
    """Write a trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing open."""
    if not output.name.lower().endswith(ENDINGS):
        raise typer.BadParameter(f"{output} must end in {' or '.join(ENDINGS)}")

    from ebbtide.analysis.export import export as write
    from ebbtide.profiler.trace import open_trace

    write(open_trace(trace), output, force)
    typer.echo(f"ebbtide: {output}   open it in https://ui.perfetto.dev", err=True)
