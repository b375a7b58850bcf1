"""`ebbtide findings`: what holds a job back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def findings(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
) -> None:
    """What holds this job back, with the evidence, and what it is worth per iteration."""
    from ebbtide.analysis.findings import find
    from ebbtide.analysis.summary import summarize
    from ebbtide.cli.explain import print_findings
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = find(opened)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_findings(opened, found, summarize(opened).iteration_ms)
