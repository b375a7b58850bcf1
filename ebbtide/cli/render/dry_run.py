"""Prints the end of a dry run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ebbtide.cli.printing import echo_line, on_stderr, print_view


def print_dry_run(path: Path) -> None:
    """Print on stderr whether the job fits, the holders of memory, the time of an iteration, and the next commands."""
    from ebbtide.analysis.tables.prediction import prediction_view
    from ebbtide.profiler.trace import open_trace

    trace = open_trace(path)
    with on_stderr():
        print_view(prediction_view(trace))
        for follow_up in ("memory {} --at peak", "plan {}"):
            echo_line(f"next: ebbtide {follow_up.format(shlex.quote(str(path)))}")
