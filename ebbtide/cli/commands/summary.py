"""`ebbtide summary`: figures of a trace by phase or another key.

Keys are phase, direction of the link, sub-step, activity, iteration or rank.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Jobs,
    Json,
    Scheduler,
    TraceFile,
    Verbose,
    rank_option,
    refuse_options,
)
from ebbtide.cli.reading import check_options, choose_ranks, read_ranks, show_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import Trace

    _Read = Callable[[Callable[[Trace], object]], None]

_ALWAYS = frozenset({"trace", "by", "verbose", "as_json"})


# Options that each table has beside the common ones, and the next command to run.
_TABLES = {
    "phase": ({"rank", "jobs", "scheduler"}, "findings {}"),
    "link": ({"rank"}, "plot {} --kind link -o link.png"),
    "substep": ({"rank"}, "findings {}"),
    "activity": ({"rank", "critical_path"}, "plot {} --kind activity -o activity.png"),
    "iteration": ({"rank", "jobs", "scheduler"}, "findings {}"),
    "rank": ({"jobs", "scheduler"}, "plot {} --kind ranks -o ranks.png"),
}


@command("Start", 3, examples=("summary run.ebb", "summary run.ebb --by iteration"))
def summary(
    context: typer.Context,
    trace: TraceFile,
    by: Annotated[
        Literal["phase", "link", "substep", "activity", "iteration", "rank"],
        typer.Option(
            "--by",
            metavar="KEY",
            help=(
                "What the rows are: phase; link (bytes and rate of each direction); "
                "substep (of the update); activity "
                "(what the GPU does, and why it does not compute); iteration; rank "
                "(those "
                "that differ first)."
            ),
        ),
    ] = "phase",
    rank: Annotated[
        int | None,
        rank_option(
            "by phase all, with the times of the slowest one; else the first one, all "
            "with --json"
        ),
    ] = None,
    critical_path: Annotated[
        bool,
        typer.Option(
            "--critical-path",
            help=(
                "With --by activity: the chain of kernels, launches, waits and host "
                "code that an iteration takes its "
                "time from."
            ),
        ),
    ] = False,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print time, memory and link use per phase: medians over the iterations of a
    trace.

    --by prints another table of the same trace."""
    refuse_options(context, _ALWAYS | _TABLES[by][0], f"does not go with --by {by}")
    check_options(jobs, scheduler)

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    if by == "phase" and rank is not None:
        opened = opened.of_ranks([rank])
    metrics, follow_up = JobMetrics(opened), _TABLES[by][1]
    all_details = verbose or as_json
    # Large traces are read in processes.
    read = partial(read_ranks, opened, jobs=jobs, scheduler=scheduler)
    if by in ("phase", "rank"):
        result, view = _of_job(
            metrics, by, read if rank is None else lambda of_trace: None, all_details
        )
        show_result(opened, result, view, as_json, follow_up)
        return
    ranks = choose_ranks(opened, rank, as_json)
    result, view = _of_ranks(metrics, by, ranks, read, all_details)
    if critical_path:
        from ebbtide.analysis.metrics.critical_path.critical_path import RankPath
        from ebbtide.analysis.tables.activity import path_view

        path = None if result.rank is None else metrics.rank(result.rank).critical_path
        result, view, follow_up = (
            RankPath(result, path),
            path_view,
            "export {} -o run.json.gz",
        )
    show_result(
        opened,
        result,
        view,
        as_json,
        follow_up,
        next(iter(ranks), None) if rank is None else None,
    )


def _of_job(
    metrics: JobMetrics, by: str, read: _Read, all_details: bool
) -> tuple[Any, Any]:
    """Return the figures of all ranks together, and their view."""
    if by == "phase":
        from ebbtide.analysis.metrics.summary import summarize
        from ebbtide.analysis.tables.summary import summary_view

        read(summarize)
        return metrics.summary(), partial(summary_view, verbose=all_details)
    from ebbtide.analysis.metrics.ranks.by_rank import rank_table
    from ebbtide.analysis.tables.ranks import ranks_view

    read(rank_table)
    return metrics.ranks(), ranks_view


def _of_ranks(
    metrics: JobMetrics, by: str, ranks: list[int], read: _Read, all_details: bool
) -> tuple[Any, Any]:
    """Return the figures of some ranks, and their view."""
    if by == "link":
        from ebbtide.analysis.tables.link import link_view

        return metrics.link(ranks), link_view
    if by == "substep":
        from ebbtide.analysis.tables.substeps import steps_view

        return metrics.substeps(ranks, all_details), steps_view
    if by == "activity":
        from ebbtide.analysis.tables.activity import activity_view

        return metrics.activity(next(iter(ranks), None)), partial(
            activity_view, verbose=all_details
        )
    from ebbtide.analysis.metrics.iteration_stats import compare_iterations
    from ebbtide.analysis.tables.iterations import iterations_view

    read(compare_iterations)
    return metrics.iterations(ranks), iterations_view
