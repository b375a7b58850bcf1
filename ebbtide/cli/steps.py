"""`ebbtide steps`: what the sub-steps of an update do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ebbtide.cli.options import Rank


def steps(
    trace: Annotated[Path, typer.Argument(metavar="RUN.ebb", help="A trace.")],
    subgroups: Annotated[
        bool, typer.Option("--subgroups", help="A table by subgroup too (--json always has it).")
    ] = False,
    rank: Rank = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Where the update's time goes, sub-step by sub-step: the CPU, the GPU, the copies that it waits for."""
    from ebbtide.analysis.substeps import sub_steps
    from ebbtide.cli.explain import print_steps, ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    found = sub_steps(opened, ranks(opened, rank, as_json), subgroups or as_json)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        print_steps(opened, found)
