"""Figures of a recording while it runs, and of a finished trace through the same interface."""

from ebbtide.analysis.live.live_trace import LiveTrace, State
from ebbtide.analysis.live.rank_figures import LiveLink, LiveMemory, LiveRank, RankState, RankTotals

__all__ = ["LiveLink", "LiveMemory", "LiveRank", "LiveTrace", "RankState", "RankTotals", "State"]
