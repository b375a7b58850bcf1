"""`ebbtide summary`: time, memory and link use per phase."""

from __future__ import annotations

import json

import typer

from ebbtide.cli.options import Json, TraceFile


def summary(
    trace: TraceFile,
    as_json: Json = False,
) -> None:
    """Print time, memory and link use per phase: medians over the iterations of a trace."""
    from ebbtide.analysis.metrics.summary import summarize
    from ebbtide.cli.render.summary import print_summary
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = summarize(opened)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        print_summary(opened, result)
