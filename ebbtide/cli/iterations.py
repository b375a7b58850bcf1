"""`ebbtide iterations`: iterations and ranks held against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Rank


def iterations(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    rank: Rank = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """How much the iterations spread, which ones are odd, and which rank the others wait for."""
    from ebbtide.analysis.spread import iterations as hold
    from ebbtide.cli.explain import print_iterations, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = hold(opened, ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_iterations(opened, found)
