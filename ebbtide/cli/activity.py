"""`ebbtide activity`: compute, communication, copies and idle time of the GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.options import Json, TraceFile, count


def activity(
    trace: TraceFile,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Rank to show.", parser=count, metavar="N", show_default="the first one"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print how long the GPU computes, communicates, copies and is idle, and why it does not compute."""
    from ebbtide.analysis.metrics.activity.activity import gpu_activity
    from ebbtide.cli.render.activity import print_activity
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = gpu_activity(opened, rank)
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_activity(opened, result)
