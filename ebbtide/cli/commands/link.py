"""`ebbtide link`: use of the link per phase."""

from __future__ import annotations

from ebbtide.cli.command import command
from ebbtide.cli.options import Json, Rank, TraceFile
from ebbtide.cli.reading import choose_ranks, show


@command("Explain", 5, examples=("link run.ebb", "link run.ebb --rank 3"))
def link(
    trace: TraceFile,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print bytes, rate and share of the peak of the link between host and GPU, per phase and direction."""
    from ebbtide.analysis.tables.link import link_view

    show(
        trace,
        as_json,
        lambda metrics: metrics.link(choose_ranks(metrics.trace, rank, as_json)),
        link_view,
        "plot {} --kind link -o link.png",
    )
