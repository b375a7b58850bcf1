"""`ebbtide plot`: memory, link and free windows over time, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ebbtide.cli.options import count, size
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.cli.outputs import picture_format


def plot(
    traces: Annotated[
        list[Path], typer.Argument(metavar="RUN.ebb...", help="One or more traces: all are drawn on the same scales.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture to write: .png, .svg or .pdf.")],
    kind: Annotated[
        Literal["both", "memory", "link", "windows"],
        typer.Option(help="What to draw: memory and link, one of them, or the windows of free memory."),
    ] = "both",
    min_bytes: Annotated[str, typer.Option(help="How much must be free in a window, e.g. 500MB.")] = "1GiB",
    iterations: Annotated[str | None, typer.Option(help="Only these iterations, e.g. 3:6.", show_default="all")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Only this rank.", parser=count, metavar="N", show_default="the first")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace the picture if it exists.")] = False,
) -> None:
    """Draw memory over time with the phases, the use of the link, or when memory is free."""
    written_as = picture_format(output)
    least = size(min_bytes)
    span = parse_iterations(iterations) if iterations is not None else (0, None)

    from ebbtide.analysis.output import new_output
    from ebbtide.analysis.plot import draw, save
    from ebbtide.profiler.trace import open_trace

    opened = [open_trace(path) for path in traces]
    with new_output(output, force, Path.is_file, "a file") as temporary:
        save(draw(opened, span, rank, kind, least), temporary, written_as)
    typer.echo(f"ebbtide: {output}", err=True)
