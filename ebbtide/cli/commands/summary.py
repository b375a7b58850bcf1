"""`ebbtide summary`: figures of a trace by phase, direction of the link, sub-step, activity, iteration or rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile, Verbose, rank_option, refuse_options
from ebbtide.cli.reading import check_options, choose_ranks, read_ranks, show_result

if TYPE_CHECKING:
    from collections.abc import Callable

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import Trace

_ALWAYS = frozenset({"trace", "by", "verbose", "as_json"})


class _Request(NamedTuple):
    """The options of a table."""

    rank: int | None
    verbose: bool
    as_json: bool
    critical_path: bool
    read: Callable[[Trace, Callable[[Trace], object]], None]  # Reads a large trace in processes.

    def ranks(self, trace: Trace) -> list[int]:
        return choose_ranks(trace, self.rank, self.as_json)

    def of_rank(self, trace: Trace) -> int | None:
        """Return the one rank that a table is of, where the user asked for none."""
        return next(iter(self.ranks(trace)), None) if self.rank is None else None


class _Printed(NamedTuple):
    """A result, its table, and the command to go on with."""

    result: Any
    view: Any
    follow_up: str
    of_rank: int | None = None


def _by_phase(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.metrics.summary import summarize
    from ebbtide.analysis.tables.summary import summary_view

    if request.rank is None:
        request.read(metrics.trace, summarize)
    return _Printed(metrics.summary(), partial(summary_view, verbose=request.verbose), "findings {}")


def _by_link(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.tables.link import link_view

    result, of_rank = metrics.link(request.ranks(metrics.trace)), request.of_rank(metrics.trace)
    return _Printed(result, link_view, "plot {} --kind link -o link.png", of_rank)


def _by_substep(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.tables.substeps import steps_view

    result = metrics.substeps(request.ranks(metrics.trace), request.verbose)
    return _Printed(result, steps_view, "findings {}", request.of_rank(metrics.trace))


def _by_activity(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.tables.activity import activity_view

    result, of_rank = metrics.activity(request.rank), request.of_rank(metrics.trace)
    if request.critical_path:
        from ebbtide.analysis.metrics.critical_path.critical_path import RankPath
        from ebbtide.analysis.tables.critical_path import path_view

        path = None if result.rank is None else metrics.rank(result.rank).critical_path
        return _Printed(RankPath(result, path), path_view, "export {} -o run.json.gz", of_rank)
    return _Printed(result, activity_view, "plot {} --kind activity -o activity.png", of_rank)


def _by_iteration(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.metrics.iteration_stats import compare_iterations
    from ebbtide.analysis.tables.iterations import iterations_view

    request.read(metrics.trace, compare_iterations)
    result, of_rank = metrics.iterations(request.ranks(metrics.trace)), request.of_rank(metrics.trace)
    return _Printed(result, iterations_view, "findings {}", of_rank)


def _by_rank(metrics: JobMetrics, request: _Request) -> _Printed:
    from ebbtide.analysis.metrics.ranks.by_rank import rank_table
    from ebbtide.analysis.tables.ranks import ranks_view

    request.read(metrics.trace, rank_table)
    return _Printed(metrics.ranks(), ranks_view, "plot {} --kind ranks -o ranks.png")


# Each table, and the options that it has beside those of all.
_TABLES: dict[str, Callable[[JobMetrics, _Request], _Printed]] = {
    "phase": _by_phase,
    "link": _by_link,
    "substep": _by_substep,
    "activity": _by_activity,
    "iteration": _by_iteration,
    "rank": _by_rank,
}
_OPTIONS = {
    "phase": {"rank", "jobs", "scheduler"},
    "link": {"rank"},
    "substep": {"rank", "subgroups"},
    "activity": {"rank", "critical_path"},
    "iteration": {"rank", "jobs", "scheduler", "by_rank"},
    "rank": {"jobs", "scheduler", "by_rank"},
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
            help="What the rows are: phase; link (bytes and rate of each direction); substep (of the update); activity "
            "(what the GPU does, and why it does not compute); iteration; rank (those that differ first).",
        ),
    ] = "phase",
    rank: Annotated[
        int | None, rank_option("by phase all, with the times of the slowest one; else the first one, all with --json")
    ] = None,
    critical_path: Annotated[
        bool,
        typer.Option(
            "--critical-path",
            help="With --by activity: the chain of kernels, launches, waits and host code that an iteration takes its "
            "time from.",
        ),
    ] = False,
    by_rank: Annotated[bool, typer.Option("--by-rank", hidden=True)] = False,
    subgroups: Annotated[bool, typer.Option("--subgroups", hidden=True)] = False,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print time, memory and link use per phase: medians over the iterations of a trace.

    --by prints another table of the same trace."""
    refuse_options(context, _ALWAYS | _OPTIONS[by], f"does not go with --by {by}")
    if by_rank:
        by = "rank"
        refuse_options(context, _ALWAYS | _OPTIONS[by], "does not go with --by-rank")
    check_options(jobs, scheduler)

    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    if by == "phase" and rank is not None:
        opened = opened.of_ranks([rank])
    read = partial(read_ranks, jobs=jobs, scheduler=scheduler)
    metrics = JobMetrics(opened)
    request = _Request(rank, verbose or subgroups or as_json, as_json, critical_path, read)
    printed = _TABLES[by](metrics, request)
    show_result(opened, printed.result, printed.view, as_json, printed.follow_up, printed.of_rank)
