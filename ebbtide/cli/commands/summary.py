"""`ebbtide summary`: time, memory and link use per phase."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile, Verbose, count
from ebbtide.cli.reading import read_ranks, show_result


@command("Start", 3, examples=("summary run.ebb", "summary run.ebb --rank 0"))
def summary(
    trace: TraceFile,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            help="Rank to summarize alone.",
            parser=count,
            metavar="N",
            show_default="all: times of the slowest one",
        ),
    ] = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print time, memory and link use per phase: medians over the iterations of a trace."""
    from ebbtide.analysis.metrics.summary import summarize
    from ebbtide.analysis.tables.summary import summary_view
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    if rank is not None:
        opened = opened.of_ranks([rank])
    else:
        read_ranks(opened, summarize, jobs, scheduler)
    show_result(opened, summarize(opened), partial(summary_view, verbose=verbose or as_json), as_json, "findings {}")
