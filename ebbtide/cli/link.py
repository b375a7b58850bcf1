"""`ebbtide link`: how the link was used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Rank


def link(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    rank: Rank = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """How the link between host and device was used: bytes, rate and share of its peak, by phase and direction."""
    from ebbtide.analysis.link import link_use
    from ebbtide.cli.explain import print_link, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = link_use(opened, ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_link(opened, found)
