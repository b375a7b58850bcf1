"""Prints the result of a dry run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOES_NOT_FIT = 3


def exit_status(output: Path, settings: Mapping[str, Any], status: int) -> int:
    """Print the result if it is to be printed, and return the exit status of a job that
    has ended with one."""
    fits = not settings["prints"] or print_dry_run(output)
    return DOES_NOT_FIT if settings["check"] and not fits and not status else status


def print_dry_run(path: Path) -> bool:
    """Print on stderr whether the job fits, its memory and time, and what is next;
    return whether it may fit."""
    # What it imports is not imported while the job runs.
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.tables.prediction import (
        MISFIT,
        largest_rank,
        prediction_view,
        verdict,
    )
    from ebbtide.cli.printing import echo_line, on_stderr, print_view
    from ebbtide.cli.reading import print_next
    from ebbtide.profiler.trace import open_trace

    trace = open_trace(path)
    metrics = JobMetrics(trace)
    with on_stderr():
        print_view(prediction_view(trace))
        echo_line(
            "figures that the script itself printed mean nothing: nothing was computed"
        )
        if metrics.pool_peak("requested"):
            rank = largest_rank(metrics)
            option = f" --rank {rank}" if rank != trace.ranks[0] else ""
            print_next(trace, f"memory {{}} --at peak{option}")
            print_next(trace, "plan {}")
    return verdict(metrics) != MISFIT
