"""Computes what ranks are compared by: values of each steady iteration of a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, main_device
from ebbtide.analysis.metrics.iterations import intervals, rank_durations, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copied_iterations, rate_samples, traffic
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS, PHASES
from ebbtide.profiler.trace import Trace

# GPUs lower their clocks on purpose while they are idle.
_LOADED_GPU_PERCENT = 50.0


@once_per_trace
def phase_series(trace: Trace, rank: int) -> pd.DataFrame:
    """Return times of a rank by steady iteration (index), ms; NaN where not recorded.

    Columns `iteration_ms`, `other_ms` and one per phase; `phases_ms`, their sum without `other`; `forward_start_ms` and
    so on, the first start of each phase since a time that all ranks share.
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
    return pd.DataFrame(columns).astype("float64")


@once_per_trace
def rank_series(trace: Trace, rank: int) -> pd.DataFrame:
    """Return values of a rank by steady iteration (index); NaN where not recorded.

    Columns of `phase_series`; `free_bytes`, the least free memory; `h2d_bytes_per_s` and `d2h_bytes_per_s`, the rate of
    copies while they run, or the highest sampled rate; `h2d_bytes` and `d2h_bytes`; `sm_clock_mhz`, the median SM clock
    of the busy GPU.
    """
    times = phase_series(trace, rank)
    spans = intervals(trace, rank).spans
    spans = spans[spans["iteration"].isin(times.index)]
    columns = {"free_bytes": _free(trace, rank), "sm_clock_mhz": _clocks(trace, rank, spans)}
    for direction in DIRECTIONS:
        moved = _moved(trace, rank, direction, spans)
        columns[f"{direction}_bytes_per_s"], columns[f"{direction}_bytes"] = moved["rate"], moved["bytes"]
    others = {name: values.reindex(times.index).astype("float64") for name, values in columns.items()}
    return times.assign(**others)


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
    moved = traffic(trace, rank, direction)
    numbers = spans["iteration"].to_numpy(np.int64)
    if moved is None:
        return pd.DataFrame({"rate": np.nan, "bytes": np.nan}, index=numbers)
    starts, ends = spans["start_ns"].to_numpy(np.int64), spans["end_ns"].to_numpy(np.int64)
    sizes = moved.total(ends) - moved.total(starts)
    samples = None if moved.busy is not None else rate_samples(trace, rank, direction)
    if moved.busy is not None:
        recorded = np.isin(numbers, copied_iterations(trace, rank))
        busy_s = np.where(recorded, moved.busy(starts, ends) / 1e9, np.nan)
        rates = sizes / np.where(busy_s > 0, busy_s, np.nan)
    elif samples is not None:
        rates = _highest(samples.ends, samples.bytes_per_s, spans)
    else:
        rates = np.full(len(spans), np.nan)
    return pd.DataFrame({"rate": rates, "bytes": sizes}, index=numbers)


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


def hosts_of(trace: Trace) -> npt.NDArray[np.str_]:
    """Return the host of each rank; empty where not recorded."""
    return np.array([trace.rank(rank).host or "" for rank in trace.ranks])


def centered_rows(values: Floats, groups: npt.NDArray[Any], of_pairs: Callable[..., Any]) -> Floats:
    """Subtract in each column the median of the group's rows, of two rows `of_pairs`; NaN in groups of one row."""
    result = np.full_like(values, np.nan)
    for group in np.unique(groups):
        rows = values[groups == group]
        recorded = ~np.isnan(rows)
        if len(rows) > 1 and recorded.any():
            columns = recorded.sum(axis=0) > 1
            center = of_pairs if len(rows) == 2 else np.nanmedian
            result[np.ix_(groups == group, columns)] = rows[:, columns] - center(rows[:, columns], axis=0)
    return result


def row_medians(rows: Floats) -> Floats:
    """Return the median of each row."""
    medians = np.full(len(rows), np.nan)
    recorded = ~np.isnan(rows).all(axis=1)
    medians[recorded] = np.nanmedian(rows[recorded], axis=1)
    return medians
