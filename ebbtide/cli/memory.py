"""`ebbtide memory`: memory pools per phase."""

from __future__ import annotations

import json

import typer

from ebbtide.cli.options import Json, Rank, TraceFile


def memory(
    trace: TraceFile,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print every memory pool per phase, and the differences: fragmentation, memory outside torch, free memory."""
    from ebbtide.analysis.metrics.memory import memory_use
    from ebbtide.cli.render.analysis import print_memory, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = memory_use(opened, ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_memory(opened, found)
