"""`ebbtide plot`: draw memory, link and windows over time."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.analysis.plot.kinds import find_kind, kind_texts
from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Force,
    Iterations,
    MinBytes,
    output_option,
    rank_option,
    size,
    valued,
)
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.cli.outputs import picture_format
from ebbtide.terminal_lines import print_note

_KINDS = "What to draw. " + " ".join(
    f"{name}: {text}" for name, text in kind_texts().items()
)


@command(
    "Explain",
    2,
    examples=(
        "plot run.ebb -o run.png",
        "plot run.ebb -o windows.svg --kind windows --iterations 3:6",
    ),
)
def plot(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN.ebb...", help="Traces to draw, all on the same scales."
        ),
    ],
    output: Annotated[Path, output_option("FILE.png|svg|pdf")],
    kind: Annotated[str, valued("KIND", _KINDS)] = "both",
    min_bytes: MinBytes = "1GiB",
    iterations: Iterations = None,
    rank: Annotated[int | None, rank_option("the first one")] = None,
    force: Force = False,
) -> None:
    """Draw memory and link use over time, windows of free memory, activity of the GPU,
    or heat maps of ranks."""
    file_format = picture_format(output)
    min_size = size(min_bytes)
    span = parse_iterations(iterations) if iterations is not None else (0, None)

    from ebbtide.analysis.plot import draw, save
    from ebbtide.output_files import new_output
    from ebbtide.profiler.trace import open_trace

    find_kind(kind)
    opened = [open_trace(path) for path in traces]
    with new_output(output, force, Path.is_file, "a file") as temporary:
        save(draw(opened, span, rank, kind, min_size), temporary, file_format)
    first, end = span
    drawn = (
        f" (iterations {first} to {end - 1})"
        if iterations is not None and end is not None
        else ""
    )
    print_note(f"{output}{drawn}")
