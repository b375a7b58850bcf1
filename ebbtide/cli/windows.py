"""`ebbtide windows`: when device memory is free."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.options import Iterations, Json, MinBytes, Rank, TraceFile, size
from ebbtide.cli.options import iterations as parse_iterations

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.windows import Windows


def windows(
    trace: TraceFile,
    min_bytes: MinBytes = "1GiB",
    min_ms: Annotated[float, typer.Option(metavar="MS", help="Least length of a window in ms.", min=0)] = 0.0,
    iterations: Iterations = None,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print when device memory is free, in which phase, for how long, and how idle the link is then."""
    least = size(min_bytes)
    span = parse_iterations(iterations) if iterations is not None else None

    from ebbtide.analysis.metrics.windows import find_windows
    from ebbtide.cli.render.analysis import ranks
    from ebbtide.cli.render.tables import print_windows
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    every = find_windows(opened, least, ranks(opened, rank, as_json))
    found = _only(every, min_ms, span)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    elif every.windows and not found.windows:
        typer.echo(f"none of {len(every.windows)} windows is that long, or in these iterations")
    else:
        print_windows(opened, found)


def _only(found: Windows, min_ms: float, span: tuple[int, int | None] | None) -> Windows:
    """Without windows that are shorter, or of other iterations."""
    windows = [w for w in found.windows if w.end_ms - w.start_ms >= min_ms]
    if span is not None:
        first, last = span
        windows = [w for w in windows if w.iteration is not None and first <= w.iteration < (last or w.iteration + 1)]
    guaranteed = [w for w in found.guaranteed if w.end_ms - w.start_ms >= min_ms]
    return replace(found, windows=windows, guaranteed=guaranteed)
