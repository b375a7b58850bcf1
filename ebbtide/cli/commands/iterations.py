"""`ebbtide iterations`: variation between iterations and ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Jobs, Json, Rank, Scheduler, TraceFile
from ebbtide.cli.reading import check_options, choose_ranks, read_ranks, show_result


@command("Explain", 7, examples=("iterations run.ebb", "iterations run.ebb --by-rank"))
def iterations(
    trace: TraceFile,
    rank: Rank = None,
    by_rank: Annotated[
        bool, typer.Option("--by-rank", help="Print a row per rank, those that differ from the others first.")
    ] = False,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
) -> None:
    """Print how iterations vary, which are outliers, and which rank is the slowest."""
    check_options(jobs, scheduler)
    if by_rank and rank is not None:
        raise typer.BadParameter("--by-rank is about all ranks: leave --rank out")

    from ebbtide.analysis.metrics.iteration_stats import compare_iterations
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.metrics.ranks.by_rank import rank_table
    from ebbtide.analysis.tables.iterations import iterations_view
    from ebbtide.analysis.tables.ranks import ranks_view
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    metrics = JobMetrics(opened)
    read_ranks(opened, rank_table if by_rank else compare_iterations, jobs, scheduler)
    if by_rank:
        show_result(opened, metrics.ranks(), ranks_view, as_json, "plot {} --kind ranks -o ranks.png")
    else:
        show_result(
            opened, metrics.iterations(choose_ranks(opened, rank, as_json)), iterations_view, as_json, "findings {}"
        )
