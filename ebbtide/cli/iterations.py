"""`ebbtide iterations`: variation between iterations and ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.options import Jobs, Json, Rank, Scheduler, TraceFile
from ebbtide.cli.scanning import check_options, read_ranks


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
    from ebbtide.analysis.metrics.iterations import rank_durations
    from ebbtide.analysis.metrics.ranks.by_rank import rank_table
    from ebbtide.analysis.metrics.ranks.figures import iteration_figures
    from ebbtide.cli.render.iterations import print_iterations
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.cli.render.rank_table import print_ranks
    from ebbtide.cli.render.ranks import choose_ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    read_ranks(opened, iteration_figures if by_rank else rank_durations, jobs, scheduler)
    if by_rank:
        table = rank_table(opened)
        if as_json:
            print_json(opened, table.as_json())
        else:
            print_prediction(opened)
            print_ranks(opened, table)
        return
    result = compare_iterations(opened, choose_ranks(opened, rank, as_json))
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_iterations(opened, result)
