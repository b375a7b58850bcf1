"""`ebbtide memory`: whose the memory is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Rank


def memory(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    rank: Rank = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Every count of memory in each phase, and what lies between them: fragmentation, memory outside torch, free."""
    from ebbtide.analysis.memory import memory_use
    from ebbtide.cli.explain import print_memory, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = memory_use(opened, ranks(opened, rank, as_json))
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_memory(opened, found)
