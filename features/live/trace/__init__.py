"""Figures of a recording while it runs, and of a finished trace.

Both have the same interface.
"""

from ebbtide.features.live.trace.live_trace import LiveTrace, State
from ebbtide.features.live.trace.rank_figures import (
    LiveLink,
    LiveMemory,
    LiveRank,
    RankState,
    RankTotals,
)

__all__ = [
    "LiveLink",
    "LiveMemory",
    "LiveRank",
    "LiveTrace",
    "RankState",
    "RankTotals",
    "State",
]
