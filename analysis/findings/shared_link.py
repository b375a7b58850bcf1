"""Finds ranks whose copies run slower while another rank copies: they share a part of the link."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.findings.common import RECORD_COPIES
from ebbtide.analysis.findings.finding import Finding, Unknown, clamp_gain
from ebbtide.analysis.metrics.link_throughput import copied_iterations, covering
from ebbtide.analysis.metrics.trace_metrics import TraceMetrics
from ebbtide.analysis.timeseries.step_functions import union, union_length
from ebbtide.units import rate_text

# Copies of at least this size measure a link's rate; the time of smaller ones is mostly that of a launch.
_LARGE_BYTES = 1 << 20
# Ranks share a link if their copies run this many times faster alone than together with another rank's.
_MIN_SLOWDOWN = 1.4
# Of a copy's time in which another rank copies: more counts as together, less as alone.
_TOGETHER_SHARE = 0.5
_ALONE_SHARE = 0.1
_MIN_COPIES = 3


def check(metrics: TraceMetrics) -> Finding | Unknown | None:
    """Compare the rates of large copies that overlap another rank's copies with those that do not."""
    if not metrics.has_gpu or metrics.world_size < 2:
        return None
    recorded = [rank for rank in metrics.trace.ranks if metrics.trace.rank(rank).transfers_recorded]
    if len(recorded) < 2:
        return Unknown("shared-link", "do ranks share a link?", RECORD_COPIES + ", on every rank")
    gain = 0.0
    evidence = []
    for (direction, kind), rows in _large_copies(metrics).groupby(["direction", "kind"]):
        together, alone = rows[rows["overlap_share"] > _TOGETHER_SHARE], rows[rows["overlap_share"] < _ALONE_SHARE]
        if len(together) < _MIN_COPIES or len(alone) < _MIN_COPIES:
            continue
        slow, fast = together["rate"].median(), alone["rate"].median()
        if fast > _MIN_SLOWDOWN * slow:
            lengths = [
                _busy_ms(copies) / len(copied_iterations(metrics.trace, int(rank)))
                for rank, copies in together.groupby("rank")
            ]
            gain += max(lengths) * (1 - slow / fast)
            evidence.append(
                f"{direction}: {kind or 'all'} copies run at {rate_text(fast)} alone and at {rate_text(slow)} "
                f"together with another rank's ({len(alone):,} and {len(together):,} copies of 1 MiB or more)"
            )
    if not evidence:
        return None
    return Finding(
        "shared-link",
        "Ranks share a link",
        clamp_gain(gain),
        tuple(evidence),
        "spread the ranks over PCIe switches and sockets (nvidia-smi topo -m), or let them copy at different times",
    )


def _large_copies(metrics: TraceMetrics) -> pd.DataFrame:
    """Return each large copy with rank, direction, kind (of host memory), start_ns, end_ns, rate (bytes/s) and
    overlap_share: the share of its time in which another rank of the host copied in the same direction."""
    rows = metrics.steady_copies
    rows = rows[(rows["bytes"].fillna(0) >= _LARGE_BYTES) & (rows["end_ns"] > rows["start_ns"])]
    hosts = {rank: metrics.trace.rank(rank).host for rank in metrics.trace.ranks}
    rows = rows.assign(host=rows["rank"].map(hosts))
    tables = []
    for (rank, direction), own in rows.groupby(["rank", "direction"]):
        others = rows[(rows["rank"] != rank) & (rows["direction"] == direction) & (rows["host"] == hosts[rank])]
        busy = covering(*union(others["start_ns"].to_numpy(np.int64), others["end_ns"].to_numpy(np.int64)))
        starts, ends = own["start_ns"].to_numpy(np.int64), own["end_ns"].to_numpy(np.int64)
        rate = own["bytes"].to_numpy(np.float64) / (ends - starts) * 1e9
        share = (busy(ends) - busy(starts)) / (ends - starts)
        tables.append(own.assign(rate=rate, overlap_share=share, kind=own["host_memory"].fillna("")))
    return pd.concat(tables) if tables else rows.assign(rate=0.0, overlap_share=0.0, kind="")


def _busy_ms(rows: pd.DataFrame) -> float:
    return union_length(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)) / 1e6
