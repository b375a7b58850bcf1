"""`ebbtide findings`: what slows a job down."""

from ebbtide.cli.command import command
from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile, Verbose
from ebbtide.cli.reading import read_ranks, show_result


@command("Start", 4, examples=("findings run.ebb", "findings run.ebb -v"))
def findings(
    trace: TraceFile,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Print what slows the job down, with evidence and the estimated gain per
    iteration."""
    from ebbtide.analysis.findings import find
    from ebbtide.analysis.tables.findings import findings_view
    from ebbtide.profiler.trace import open_trace
    from ebbtide.trace_analysis import TraceAnalysis

    opened = open_trace(trace)
    read_ranks(opened, find, jobs, scheduler)
    analysis = TraceAnalysis(opened)
    show_result(
        opened,
        analysis.findings(),
        lambda trace, result: findings_view(
            trace, result, analysis.iteration_ms, verbose
        ),
        as_json,
        "replay {} --recommend" if analysis.offloaded else "report {} -o report.html",
    )
