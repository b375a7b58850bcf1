"""`ebbtide plot`: memory and link use over time, as a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import count
from ebbtide.cli.options import iterations as parse_iterations

FORMATS = (".png", ".svg", ".pdf")


def plot(
    traces: Annotated[list[Path], typer.Argument(metavar="RUN.ebb...", help="One or more traces.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write: .png, .svg or .pdf.")],
    iterations: Annotated[str | None, typer.Option(help="Only these iterations, e.g. 3:6.", show_default="all")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank.", parser=count, metavar="N", show_default="the first")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the picture if it exists.")] = False,
) -> None:
    """Draw memory over time with the phases, and the use of the link below it."""
    if output.suffix.lower() not in FORMATS:
        raise typer.BadParameter(f"{output} must end in {', '.join(FORMATS)}: the ending chooses the format")
    if os.path.lexists(output) and not force:
        raise typer.BadParameter(f"{output} exists already: choose another -o, or replace it with --force")
    span = parse_iterations(iterations) if iterations is not None else (0, None)

    from ebbtide.analysis.plot import draw
    from ebbtide.profiler.trace import open_trace
    from ebbtide.profiler.trace.errors import UserError

    opened = [open_trace(path) for path in traces]
    figure = draw(opened, span, rank)
    try:
        figure.savefig(output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from None
    typer.echo(f"ebbtide: {output}", err=True)
