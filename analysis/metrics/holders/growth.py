"""Memory that is held longer from iteration to iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import main_device
from ebbtide.analysis.metrics.holders.categories import call_site, categorized_allocations
from ebbtide.profiler.trace import Trace

_LASTING = ("parameter", "buffer", "optimizer_state")


@dataclass(frozen=True)
class Growth:
    """Blocks of one call site that each iteration leaves behind."""

    site: str | None  # The call site, as `function (file:line)`; None where stacks were not recorded.
    module: str | None  # Dotted name of the module whose forward allocated them; None where not known.
    bytes_per_iteration: int  # The least that one of the iterations left behind.
    iterations: int  # Number of the iterations that were compared.


@once_per_trace
def memory_growth(trace: Trace, rank: int) -> list[Growth] | None:
    """Find call sites whose blocks stay: each recorded iteration allocates some that are held past the next one.

    Gradients that are kept for the next iteration are released or written again in it, so they do not count, nor do
    parameters, buffers and optimizer state. The sites with the most bytes are first; None where allocations of fewer
    than three iterations were recorded.
    """
    device = main_device(trace, rank)
    if device is None or trace.allocations(rank).empty:
        return None
    rows = categorized_allocations(trace, rank, device)
    updates = trace.phases(rank)
    updates = updates[(updates["phase"] == "update") & updates["iteration"].notna()]
    ends = updates.groupby("iteration")["end_ns"].max()
    # The captured iterations: those that end in the span of the allocations.
    span = int(rows["start_ns"].min()), int(rows["start_ns"].max())
    bounds = ends[(ends > span[0]) & (ends <= span[1])].to_numpy(np.int64)
    if len(bounds) < 3:
        return None
    number = np.searchsorted(bounds, rows["start_ns"].to_numpy(np.int64))
    own = (rows["start_ns"] > span[0]) & (number < len(bounds) - 1) & ~rows["category"].isin(_LASTING)
    own &= rows["end_ns"].to_numpy(np.int64) > bounds[np.minimum(number + 1, len(bounds) - 1)]
    left = rows[own].assign(iteration=number[own])
    if left.empty:
        return []
    sites = {stack: call_site(stack) for stack in left["stack"].cat.categories}
    left = left.assign(site=left["stack"].map(sites).astype(object))
    sums = left.groupby(["site", "module", "iteration"], dropna=False, observed=True)["bytes"].sum()
    by_site = sums.groupby(level=[0, 1], dropna=False).agg(["min", "size"])
    compared = len(bounds) - 1
    entries = [
        Growth(_text(site), _text(module), int(least), compared)
        for (site, module), least, count in zip(by_site.index, by_site["min"], by_site["size"], strict=True)
        if count == compared
    ]
    return sorted(entries, key=lambda entry: -entry.bytes_per_iteration)


def _text(value: object) -> str | None:
    return None if pd.isna(value) else str(value)
