"""`ebbtide iterations`: variation between iterations and ranks."""

from __future__ import annotations

from ebbtide.cli.options import Json, Rank, TraceFile


def iterations(
    trace: TraceFile,
    rank: Rank = None,
    as_json: Json = False,
) -> None:
    """Print how iterations vary, which are outliers, and which rank is the slowest."""
    from ebbtide.analysis.metrics.iteration_stats import compare_iterations
    from ebbtide.cli.render.iterations import print_iterations
    from ebbtide.cli.render.prediction import print_json, print_prediction
    from ebbtide.cli.render.ranks import choose_ranks
    from ebbtide.profiler.trace import open_trace

    opened = open_trace(trace)
    result = compare_iterations(opened, choose_ranks(opened, rank, as_json))
    if as_json:
        print_json(opened, result.as_json())
    else:
        print_prediction(opened)
        print_iterations(opened, result)
