"""Runs the commands that read a trace: opens it, computes a result, and prints it as
text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from ebbtide.cli.printing import echo, echo_line, print_view, progress_bar

if TYPE_CHECKING:
    from ebbtide.analysis.tables.table import View
    from ebbtide.profiler.trace import Trace

# Processes start in about a second; a rank of 10 MB takes as long.
_MIN_BYTES_FOR_PROCESSES = 100e6


class Result(Protocol):
    """A result of the analysis."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that the command prints with `--json`."""


Kind = TypeVar("Kind", bound=Result)


def show_result(
    trace: Trace,
    result: Kind,
    view: Callable[[Trace, Kind], View],
    as_json: bool,
    follow_up: str,
    of_rank: int | None = None,
) -> None:
    """Print a result of a trace, and below figures the next command to run.

    The command is `follow_up`, with {} for the trace. `of_rank`: the one rank that it
    is of, where the user asked for none.
    """
    from ebbtide.analysis.tables.table import Gain, Table

    if as_json:
        print_json(trace, result.as_json())
    else:
        print_prediction(trace)
        parts = list(view(trace, result))
        print_view(iter(parts))
        if any(
            isinstance(part, Gain) or (isinstance(part, Table) and part)
            for part in parts
        ):
            print_rank(trace, of_rank)
            print_next(trace, follow_up)


def print_rank(trace: Trace, rank: int | None) -> None:
    """Print which rank figures are of, if the user did not ask for it.

    There are other ranks then.
    """
    if rank is not None and len(trace.ranks) > 1:
        echo(
            f"rank {rank} of {len(trace.ranks)} ranks (--rank N for another one, "
            "--json for all)"
        )


def print_next(trace: Trace, follow_up: str) -> None:
    """Print the command to go on with, with {} for the trace."""
    from ebbtide.profiler.trace.trace import next_line

    echo_line(next_line(trace, follow_up))


def print_prediction(trace: Trace) -> None:
    """Print a line if a dry run made the trace."""
    from ebbtide.analysis.metrics.prediction import prediction_line

    if line := prediction_line(trace):
        echo_line(f"{trace.path}: {line}")


def print_json(trace: Trace, printed: dict[str, Any]) -> None:
    """Print a JSON object about a trace, with `predicted`: true if a dry run made the
    trace."""
    from ebbtide.analysis.metrics.prediction import is_predicted

    echo(
        json.dumps({**printed, **({"predicted": True} if is_predicted(trace) else {})})
    )


def choose_ranks(trace: Trace, rank: int | None, as_json: bool) -> list[int]:
    """Return the ranks to print: `rank` (TraceError without such a one), else the first
    one, or all as JSON."""
    if rank is not None:
        trace.rank(rank)
        return [rank]
    return trace.ranks if as_json else trace.ranks[:1]


def read_ranks(
    trace: Trace,
    read: Callable[[Trace], object],
    jobs: int | None,
    scheduler: str | None = None,
) -> None:
    """Compute a result part by part where processes or a cluster are asked for.

    Do so for a large trace, too; `jobs` None: as many processes as cores for a large
    trace. Raises UserError where no cluster answers, or a worker died.
    """
    check_options(jobs, scheduler)
    from ebbtide.host_limits import cores

    is_on_disk = trace.meta.state == "complete"
    if not is_on_disk or len(trace.ranks) < 2:
        return
    processes = jobs or (
        cores() if trace.stored_bytes >= _MIN_BYTES_FOR_PROCESSES else 1
    )
    if scheduler is None and processes == 1:
        return
    from ebbtide.analysis.metrics.ranks.scan import scan_ranks
    from ebbtide.workers import runner

    with progress_bar() as update:
        scan_ranks(
            trace,
            read,
            runner(processes, scheduler),
            lambda done, total: update(f"{done} of {total} ranks", done, total),
        )


def check_options(jobs: int | None, scheduler: str | None) -> None:
    """Check the options `--jobs` and `--scheduler`. Raises BadParameter where they do
    not fit."""
    if scheduler == "":
        raise typer.BadParameter("--scheduler needs an address, e.g. tcp://host:8786")
    if jobs == 0 or (jobs and scheduler):
        raise typer.BadParameter(
            "--jobs must be at least 1, and cannot be combined with --scheduler: a "
            "cluster has its own workers"
        )
