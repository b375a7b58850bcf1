"""`ebbtide steps`: sub-steps of the update."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.options import Json, Rank, TraceFile


def steps(
    trace: TraceFile,
    subgroups: Annotated[
        bool, typer.Option("--subgroups", help="Also print a table per subgroup (--json always has it).")
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print the sub-steps of the update: time on CPU and GPU, and the copies that each one waits for."""
    from ebbtide.analysis.metrics.substeps.breakdown import sub_steps
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.cli.render.ranks import choose_ranks
    from ebbtide.cli.render.steps import print_steps
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = sub_steps(opened, choose_ranks(opened, rank, as_json), subgroups or as_json)
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_steps(opened, result)
