"""`ebbtide activity`: compute, communication, copies and idle time of the GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, TraceFile, count
from ebbtide.cli.reading import show


@command("Explain", 4, examples=("activity run.ebb", "activity run.ebb --rank 3"))
def activity(
    trace: TraceFile,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Rank to show.", parser=count, metavar="N", show_default="the first one"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print how long the GPU computes, communicates, copies and is idle, and why it does not compute."""
    from ebbtide.analysis.tables.activity import activity_view

    show(
        trace, as_json, lambda metrics: metrics.activity(rank), activity_view, "plot {} --kind activity -o activity.png"
    )
