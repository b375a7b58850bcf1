"""`ebbtide windows`: when memory of the device is free."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Iterations,
    Json,
    MinBytes,
    Rank,
    TraceFile,
    Verbose,
    size,
)
from ebbtide.cli.options import iterations as parse_iterations
from ebbtide.cli.printing import echo
from ebbtide.cli.reading import choose_ranks, show_result

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.windows import Windows


@command(
    "Start",
    5,
    examples=("windows run.ebb", "windows run.ebb --min-bytes 10GiB --min-ms 50"),
)
def windows(
    trace: TraceFile,
    min_bytes: MinBytes = "1GiB",
    min_ms: Annotated[
        float,
        typer.Option(metavar="MS", help="Minimum length of a window in ms.", min=0),
    ] = 0.0,
    iterations: Iterations = None,
    rank: Rank = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print when GPU memory is free (host memory, for a job without a GPU), in which
    phase, for how long, and how idle the link is then."""
    min_size = size(min_bytes)
    span = parse_iterations(iterations) if iterations is not None else None

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.tables.windows import windows_view
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    shown = choose_ranks(opened, rank, as_json)
    all_windows = JobMetrics(opened).windows(min_size, shown)
    result = _select(all_windows, min_ms, span)
    if all_windows.windows and not result.windows and not as_json:
        echo(
            f"none of the {len(all_windows.windows)} windows matches --min-ms and "
            "--iterations"
        )
    else:
        view = partial(windows_view, verbose=verbose or as_json)
        of_rank = next(iter(shown), None) if rank is None else None
        show_result(
            opened,
            result,
            view,
            as_json,
            "plot {} --kind windows -o windows.png",
            of_rank,
        )


def _select(
    all_windows: Windows, min_ms: float, span: tuple[int, int | None] | None
) -> Windows:
    """Leave out windows that are shorter than `min_ms` or not in the range `span` of
    iterations."""
    windows = [w for w in all_windows.windows if w.length_ms >= min_ms]
    if span is not None:
        first, last = span
        windows = [
            w
            for w in windows
            if w.iteration is not None
            and first <= w.iteration < (last or w.iteration + 1)
        ]
    guaranteed = [w for w in all_windows.guaranteed if w.length_ms >= min_ms]
    return replace(all_windows, windows=windows, guaranteed=guaranteed)
