"""Chooses the ranks of a large job that are shown in detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ebbtide.analysis.metrics.ranks.comparison import rank_differences
from ebbtide.analysis.metrics.ranks.rank_series import phase_series
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.profiler.trace import Trace

# All ranks of a job with at most so many are shown.
MAX_RANKS = 8
# Of a larger job: so many ranks that differ, each with another cause, beside the slowest, median and fastest one.
_MAX_DIFFERING = 3


class ShownRank(NamedTuple):
    """A rank that is shown in detail, and why; empty where all ranks are shown."""

    rank: int
    reason: str


def shown_ranks(trace: Trace, asked: Sequence[int] = ()) -> list[ShownRank]:
    """Return the ranks to show in detail. Raises TraceError where the trace does not have one that is asked for.

    Of a job with up to 8 ranks these are the ranks asked for, or all. Of a larger one: the ranks asked for; the
    slowest, the median and the fastest one, by the time of all phases; and ranks that differ from the others, one of
    each cause.
    """
    for rank in asked:
        trace.rank(rank)
    if len(trace.ranks) <= MAX_RANKS:
        return [ShownRank(rank, "") for rank in dict.fromkeys(asked or trace.ranks)]
    reasons: dict[int, list[str]] = {rank: ["asked for"] for rank in asked}
    medians = {rank: median_or_none(phase_series(trace, rank).columns["phases_ms"]) for rank in trace.ranks}
    by_time = [rank for _, rank in sorted((ms, rank) for rank, ms in medians.items() if ms is not None)]
    if by_time:
        chosen = {"slowest": by_time[-1], "median": by_time[len(by_time) // 2], "fastest": by_time[0]}
        for reason, rank in chosen.items():
            reasons.setdefault(rank, []).append(reason)
    causes: dict[str, int] = {}
    for difference in rank_differences(trace).differences:
        causes.setdefault(difference.cause, difference.ranks[0])
    for cause, rank in list(causes.items())[:_MAX_DIFFERING]:
        reasons.setdefault(rank, []).append(cause)
    return [ShownRank(rank, ", ".join(texts)) for rank, texts in reasons.items()] or [
        ShownRank(rank, "") for rank in trace.ranks[:MAX_RANKS]
    ]
