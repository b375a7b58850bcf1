"""`ebbtide findings`: what slows a job down."""

from ebbtide.cli.command import command
from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile, Verbose
from ebbtide.cli.reading import read_ranks, show_result


@command("Start", 4, examples=("findings run.ebb", "findings run.ebb -v"))
def findings(
    trace: TraceFile, jobs: Jobs = None, scheduler: Scheduler = None, verbose: Verbose = False, as_json: Json = False
) -> None:
    """Print what slows the job down, with evidence and the estimated gain per iteration."""
    from ebbtide.analysis.findings import find
    from ebbtide.analysis.metrics.iterations import median_ms
    from ebbtide.analysis.metrics.job import JobMetrics
    from ebbtide.analysis.tables.findings import findings_view
    from ebbtide.interleave.advise.trace_advice import TraceAdviser
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    read_ranks(opened, find, jobs, scheduler)
    iteration_ms = median_ms(opened, "iteration")
    show_result(
        opened,
        find(opened, TraceAdviser(opened)),
        lambda trace, result: findings_view(trace, result, iteration_ms, verbose),
        as_json,
        "replay {} --recommend" if JobMetrics(opened).offloaded else "report {} -o report.html",
    )
