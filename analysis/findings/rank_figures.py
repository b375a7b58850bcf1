"""Computes what the rules and the report need of a rank."""

from __future__ import annotations

from ebbtide.analysis.metrics.activity.busy_time import busy_time
from ebbtide.analysis.metrics.drift import rank_drifts
from ebbtide.analysis.metrics.free_profile import free_steps
from ebbtide.analysis.metrics.holders.growth import memory_growth
from ebbtide.analysis.metrics.link import rank_link_use
from ebbtide.analysis.metrics.memory import rank_memory_use
from ebbtide.analysis.metrics.ranks.figures import summary_figures
from ebbtide.analysis.metrics.substeps.operations import op_names
from ebbtide.analysis.metrics.trace_start import rank_start_ns
from ebbtide.profiler.trace import Trace


def finding_figures(trace: Trace, rank: int) -> None:
    """Compute the figures of a rank that `find` and `write_report` read, which keep their results."""
    summary_figures(trace, rank)
    rank_link_use(trace, rank)
    rank_memory_use(trace, rank)
    rank_drifts(trace, rank)
    free_steps(trace, rank)
    op_names(trace, rank)
    busy_time(trace, rank)
    memory_growth(trace, rank)
    rank_start_ns(trace, rank)
