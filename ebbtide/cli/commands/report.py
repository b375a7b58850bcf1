"""`ebbtide report`: write a trace as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import (
    Force,
    Jobs,
    MinBytes,
    Scheduler,
    TraceFile,
    output_option,
    rank_option,
    size,
)
from ebbtide.cli.reading import read_ranks
from ebbtide.terminal_lines import print_note


@command(
    "Start",
    6,
    examples=(
        "report run.ebb -o run.html",
        "report run.ebb -o run.html --rank 0 --rank 7",
    ),
)
def report(
    trace: TraceFile,
    output: Annotated[Path, output_option("FILE.html")],
    min_bytes: MinBytes = "1GiB",
    rank: Annotated[
        list[int] | None,
        rank_option(
            "all up to 8; of more, the slowest, median and fastest one and some that "
            "differ, beside these"
        ),
    ] = None,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    force: Force = False,
) -> None:
    """Write one HTML page that opens offline: findings, summary, timeline, windows,
    iterations."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{output} must end in .html")
    min_size = size(min_bytes)

    from ebbtide.analysis.findings import find
    from ebbtide.analysis.report import write_report
    from ebbtide.profiler.trace import open_trace
    from ebbtide.trace_analysis import TraceAnalysis

    opened = open_trace(trace)
    read_ranks(opened, find, jobs, scheduler)
    write_report(
        opened, TraceAnalysis(opened).findings(), output, min_size, rank or [], force
    )
    print_note(f"{output} (open it in a browser)")
