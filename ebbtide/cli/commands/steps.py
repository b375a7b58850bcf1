"""`ebbtide steps`: sub-steps of the update."""

from __future__ import annotations

from typing import Annotated

import typer

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Rank, TraceFile
from ebbtide.cli.reading import choose_ranks, show


@command("Explain", 6, examples=("steps run.ebb", "steps run.ebb --subgroups"))
def steps(
    trace: TraceFile,
    subgroups: Annotated[
        bool, typer.Option("--subgroups", help="Also print a table per subgroup (--json always has it).")
    ] = False,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print the sub-steps of the update: time on CPU and GPU, and the copies that each one waits for."""
    from ebbtide.analysis.tables.substeps import steps_view

    show(
        trace,
        as_json,
        lambda metrics: metrics.substeps(choose_ranks(metrics.trace, rank, as_json), subgroups or as_json),
        steps_view,
        "findings {}",
    )
