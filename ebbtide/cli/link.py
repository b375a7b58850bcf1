"""`ebbtide link`: use of the link per phase."""

from __future__ import annotations

import json

import typer

from ebbtide.cli.options import Json, Rank, TraceFile


def link(
    trace: TraceFile,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print bytes, rate and share of the peak of the link between host and GPU, per phase and direction."""
    from ebbtide.analysis.metrics.link import link_use
    from ebbtide.cli.render.analysis import print_link, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = link_use(opened, ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_link(opened, found)
