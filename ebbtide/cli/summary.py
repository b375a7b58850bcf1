"""`ebbtide summary`: time, memory and link use per phase."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile, count
from ebbtide.cli.printing import echo
from ebbtide.cli.scanning import read_ranks


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
    as_json: Json = False,
) -> None:
    """Print time, memory and link use per phase: medians over the iterations of a trace."""
    from ebbtide.analysis.metrics.ranks.figures import summary_figures
    from ebbtide.analysis.metrics.summary import summarize
    from ebbtide.cli.render.summary import print_summary
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    if rank is not None:
        opened = opened.of_rank(rank)
    else:
        read_ranks(opened, summary_figures, jobs, scheduler)
    result = summarize(opened)
    if as_json:
        echo(json.dumps(result.as_json()))
    else:
        print_summary(opened, result)
