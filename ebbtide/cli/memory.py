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
    from ebbtide.cli.render.memory import print_memory
    from ebbtide.cli.render.ranks import choose_ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = memory_use(opened, choose_ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(result.as_json()))
    else:
        print_memory(opened, result)
