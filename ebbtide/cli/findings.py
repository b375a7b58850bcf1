"""`ebbtide findings`: what slows a job down."""

from __future__ import annotations

from ebbtide.cli.options import Jobs, Json, Scheduler, TraceFile
from ebbtide.cli.scanning import read_ranks


def findings(
    trace: TraceFile,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    as_json: Json = False,
) -> None:
    """Print what slows the job down, with evidence and the estimated gain per iteration."""
    from ebbtide.analysis.findings import find
    from ebbtide.analysis.findings.rank_figures import finding_figures
    from ebbtide.analysis.metrics.iterations import median_ms
    from ebbtide.cli.render.findings import print_findings
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    read_ranks(opened, finding_figures, jobs, scheduler)
    result = find(opened)
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_findings(opened, result, median_ms(opened, "iteration"))
