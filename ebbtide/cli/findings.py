"""`ebbtide findings`: what slows a job down."""

from __future__ import annotations

from ebbtide.cli.options import Json, TraceFile


def findings(
    trace: TraceFile,
    as_json: Json = False,
) -> None:
    """Print what slows the job down, with evidence and the estimated gain per iteration."""
    from ebbtide.analysis.findings import find
    from ebbtide.analysis.metrics.iterations import median_ms
    from ebbtide.cli.render.findings import print_findings
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = find(opened)
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_findings(opened, result, median_ms(opened, "iteration"))
