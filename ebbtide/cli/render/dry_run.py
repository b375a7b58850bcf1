"""Prints the end of a dry run."""

from pathlib import Path

from ebbtide.cli.printing import echo_line, on_stderr, print_view
from ebbtide.cli.reading import print_next


def print_dry_run(path: Path) -> bool:
    """Print on stderr whether the job fits, its memory and time, and what is next; return whether it may fit."""
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.tables.prediction import MISFIT, prediction_view, verdict
    from ebbtide.profiler.trace import open_trace

    trace = open_trace(path)
    with on_stderr():
        print_view(prediction_view(trace))
        echo_line("figures that the script itself printed mean nothing: nothing was computed")
        for follow_up in ("memory {} --at peak", "plan {}"):
            print_next(trace, follow_up)
    return verdict(JobMetrics(trace)) != MISFIT
