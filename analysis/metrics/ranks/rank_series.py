"""Computes what ranks are compared by: values of each steady iteration of a rank."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, main_device
from ebbtide.analysis.metrics.iterations import intervals, rank_durations, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copied_iterations, rate_samples
from ebbtide.analysis.metrics.phases import link_table, phase_peaks
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import Trace

# GPUs lower their clocks on purpose while they are idle.
_LOADED_GPU_PERCENT = 50.0


@once_per_trace
def rank_series(trace: Trace, rank: int) -> pd.DataFrame:
    """Return values of a rank by steady iteration (index); NaN where not recorded.

    Returns:
        Columns `iteration_ms`, `other_ms` and one per phase; `phases_ms`, their sum without `other`; `forward_start_ms`
        and so on, the first start of each phase since a time that all ranks share; `free_bytes`, the least free memory;
        `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate of copies while they run, or the highest sampled rate;
        `h2d_bytes` and `d2h_bytes`; `sm_clock_mhz`, the median SM clock of the busy GPU.
    """
    times = intervals(trace, rank)
    numbers = steady_iterations(trace).numbers
    durations = rank_durations(trace, rank).reindex(numbers)
    columns = {f"{part}_ms": durations[part] for part in ("iteration", *ITERATION_PARTS)}
    columns["phases_ms"] = durations[list(PHASES)].sum(axis=1, min_count=1)
    starts = times.phases.groupby(["phase", "iteration"], observed=True)["start_ns"].min()
    for phase in PHASES:
        own = starts.xs(phase) if phase in starts.index.get_level_values(0) else pd.Series(dtype="int64")
        columns[f"{phase}_start_ms"] = ((own - origin_ns(trace)) / 1e6).reindex(numbers)
    spans = times.spans[times.spans["iteration"].isin(numbers)]
    columns["free_bytes"] = _free(trace, rank)
    for direction in DIRECTIONS:
        moved = _moved(trace, rank, direction, spans)
        columns[f"{direction}_bytes_per_s"], columns[f"{direction}_bytes"] = moved["rate"], moved["bytes"]
    columns["sm_clock_mhz"] = _clocks(trace, rank, spans)
    return pd.DataFrame({name: values.reindex(numbers) for name, values in columns.items()}).astype("float64")


@once_per_trace
def origin_ns(trace: Trace) -> int:
    """Return the time that starts of phases count from: the first iteration of the first rank."""
    spans = [intervals(trace, rank).spans for rank in trace.ranks[:1]]
    return int(spans[0]["start_ns"].iloc[0]) if spans and len(spans[0]) else 0


def _free(trace: Trace, rank: int) -> pd.Series[float]:
    pool, capacity = free_pool(trace), capacity_bytes(trace, rank)
    if pool is None or capacity is None:
        return pd.Series(dtype="float64")
    return capacity - phase_peaks(trace, rank, pool).max(axis=1)


def _moved(trace: Trace, rank: int, direction: str, spans: pd.DataFrame) -> pd.DataFrame:
    """Return the columns `rate` (bytes/s) and `bytes` by iteration."""
    rows = link_table(trace, rank)
    rows = rows[rows["direction"] == direction]
    totals = rows.groupby("iteration")[["bytes", "busy_ms"]].sum(min_count=1)
    if trace.rank(rank).transfers_recorded:
        totals = totals[totals.index.isin(copied_iterations(trace, rank))]
        busy_s = totals["busy_ms"] / 1e3
        return pd.DataFrame({"rate": totals["bytes"] / busy_s.where(busy_s > 0), "bytes": totals["bytes"]})
    samples = rate_samples(trace, rank, direction)
    if samples is None:
        return pd.DataFrame({"rate": np.nan, "bytes": totals["bytes"]})
    highest = pd.Series(_highest(samples.ends, samples.bytes_per_s, spans), index=spans["iteration"])
    return pd.DataFrame({"rate": highest, "bytes": totals["bytes"]})


def _highest(ends: Ints, rates: Floats, spans: pd.DataFrame) -> Floats:
    """Return the highest of the samples that end in each span; NaN where there is none."""
    first = np.searchsorted(ends, spans["start_ns"].to_numpy(np.int64), side="right")
    after = np.searchsorted(ends, spans["end_ns"].to_numpy(np.int64), side="right")
    highest = np.full(len(spans), np.nan)
    some = after > first
    if some.any():
        bounds = np.stack([first[some], after[some]], axis=1).ravel()
        highest[some] = np.maximum.reduceat(np.append(rates, -np.inf), bounds)[::2]
    return highest


def _clocks(trace: Trace, rank: int, spans: pd.DataFrame) -> pd.Series[float]:
    rows = trace.gpu(rank)
    if rows.empty or spans.empty:
        return pd.Series(dtype="float64")
    rows = rows[(rows["device"] == main_device(trace, rank)) & rows["sm_clock_mhz"].notna()]
    rows = rows[rows["utilization_percent"] >= _LOADED_GPU_PERCENT]
    times = rows["t_ns"].to_numpy(np.int64)
    index = np.searchsorted(spans["start_ns"].to_numpy(np.int64), times, side="right") - 1
    inside = (index >= 0) & (times < spans["end_ns"].to_numpy(np.int64)[np.maximum(index, 0)])
    numbers = spans["iteration"].to_numpy(np.int64)[index[inside]]
    return rows["sm_clock_mhz"][inside].astype("float64").groupby(numbers).median()
