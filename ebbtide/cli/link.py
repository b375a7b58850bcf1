"""`ebbtide link`: use of the link per phase."""

from __future__ import annotations

from ebbtide.cli.options import Json, Rank, TraceFile


def link(
    trace: TraceFile,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print bytes, rate and share of the peak of the link between host and GPU, per phase and direction."""
    from ebbtide.analysis.metrics.link import link_use
    from ebbtide.cli.render.link import print_link
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.cli.render.ranks import choose_ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = link_use(opened, choose_ranks(opened, rank, as_json))
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_link(opened, result)
