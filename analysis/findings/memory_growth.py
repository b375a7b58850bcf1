"""Finds call sites that leave blocks of memory behind in every iteration."""

from __future__ import annotations

from ebbtide.analysis.findings.finding import Finding
from ebbtide.analysis.metrics.holders.growth import memory_growth
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.units import bytes_text

_MAX_SITES = 3


def check(metrics: TraceMetrics) -> Finding | None:
    """Report what `memory_growth` finds, of the rank with the most bytes."""
    by_rank = {rank: memory_growth(metrics.trace, rank) or [] for rank in metrics.trace.ranks}
    totals = {rank: sum(site.bytes_per_iteration for site in sites) for rank, sites in by_rank.items()}
    rank = max(totals, key=lambda number: totals[number], default=None)
    if rank is None or not totals[rank]:
        return None
    sites = by_rank[rank]
    evidence = [
        f"rank {rank}: each of {sites[0].iterations} iterations leaves at least {bytes_text(totals[rank])} behind",
        *(
            f"{bytes_text(site.bytes_per_iteration)} by {site.site or 'an unknown call site'}"
            + (f" in {site.module}" if site.module else "")
            for site in sites[:_MAX_SITES]
        ),
    ]
    return Finding(
        "memory-growth",
        "Memory grows from iteration to iteration",
        None,
        tuple(evidence),
        "look for tensors that are kept at these places: losses that are summed with their graph (use loss.item()), "
        "lists and caches of outputs",
    )
