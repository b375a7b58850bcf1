"""`ebbtide windows`: when device memory is free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import size


def windows(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    min_bytes: Annotated[str, typer.Option(help="How much must be free, e.g. 500MB.")] = "1GiB",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """When at least so much device memory is free, in which phase, and how idle the link is then."""
    least = size(min_bytes)

    from ebbtide.analysis.windows import find_windows
    from ebbtide.cli.tables import print_windows
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = find_windows(opened, least)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_windows(opened, found)
