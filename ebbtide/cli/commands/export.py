"""`ebbtide export`: write a trace for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Force, TraceFile

ENDINGS = (".json", ".json.gz")


@command("Files", 1, examples=("export run.ebb -o run.json.gz", "export run.ebb -o run.json --force"))
def export(
    trace: TraceFile,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write: .json or .json.gz.")],
    force: Force = False,
) -> None:
    """Write a trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing open."""
    if not output.name.lower().endswith(ENDINGS):
        raise typer.BadParameter(f"{output} must end in {' or '.join(ENDINGS)}")

    from ebbtide.analysis.export.chrome_trace import write_chrome_trace
    from ebbtide.profiler.trace import open_trace

    write_chrome_trace(open_trace(trace), output, force)
    typer.echo(f"ebbtide: {output} (open it in https://ui.perfetto.dev)", err=True)
