"""`ebbtide summary`: a trace in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def summary(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Time, memory and link use of each phase, over the iterations of a trace."""
    from ebbtide.analysis.summary import summarize
    from ebbtide.cli.tables import print_summary
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = summarize(opened)
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        print_summary(opened, result)
