"""Compares a run with its own beginning: iteration times, links, clocks and free memory that drift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, main_device, peak_pool
from ebbtide.analysis.metrics.iterations import intervals, slowest_times, steady_iterations
from ebbtide.analysis.metrics.link_throughput import copies
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.timeseries.change_point import MIN_VALUES, find_change
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from ebbtide.profiler.trace import Trace

# Changes below these shares of the beginning are not reported, whatever their statistics. Free memory counts as a share
# of the capacity: 0.5 % are 0.4 GiB of 80.
_MIN_SHARES = {"iteration_time": 0.05, "link_speed": 0.1, "copy_rate": 0.1, "sm_clock": 0.05, "free_memory": 0.005}
# Samples of a link or a GPU count only under load: idle links drop to generation 1, and idle GPUs lower their clocks,
# on purpose. A link is loaded if it carries this share of what it then can.
_LOADED_LINK_SHARE = 0.02
_LOADED_GPU_PERCENT = 50.0
# Of a steady loss of memory, a third is in the last third of the run.
_MIN_SHARE_AT_END = 0.2
# Copies of at least this size measure a link's rate.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Drift:
    """A quantity that is worse at the end of a run than at its beginning."""

    # `iteration_time` (ms), `link_speed` (bytes/s that generation and lanes allow, in samples with traffic),
    # `copy_rate` (bytes/s of copies of 1 MiB or more), `sm_clock` (MHz, in samples with a utilization of 50 % or more)
    # or `free_memory` (least bytes of an iteration).
    quantity: str
    rank: int | None  # The rank where it changes most; None for the iteration time, which is that of the slowest rank.
    before: float  # Median before the change began.
    after: float  # Median of the last third.
    first: float  # The first iteration after the change, or the first sample's ms from the beginning of the trace.
    counts_iterations: bool  # Whether `first` is an iteration.
    is_gradual: bool  # Whether a line fits the values better than a step.
    mean_change: float  # Mean change over all values, which is smaller than after - before where it began late.


def find_drifts(trace: Trace) -> list[Drift]:
    """Find the quantities that become worse during a run.

    A change is found by `find_change` among the values of the steady iterations: medians over each, for links and
    clocks of the samples under load. In a trace without iterations only the speed of the link is compared, over
    samples: memory that grows while a job starts is no drift."""
    drifts: dict[str, Drift] = {}
    for drift in (drift for rank in (None, *trace.ranks) for drift in rank_drifts(trace, rank).drifts):
        worst = drifts.get(drift.quantity)
        if worst is None or _share(drift) > _share(worst):
            drifts[drift.quantity] = drift
    return list(drifts.values())


class RankDrifts(NamedTuple):
    """The drifts of a rank, and the quantities of which it has enough values."""

    drifts: list[Drift]
    compared: list[str]


@once_per_trace
def rank_drifts(trace: Trace, rank: int | None) -> RankDrifts:
    """Compare a rank, or (None) the iteration time of the slowest one, with its beginning."""
    drifts: list[Drift] = []
    compared: list[str] = []
    if 0 < len(steady_iterations(trace).numbers) < MIN_VALUES:
        return RankDrifts(drifts, compared)
    for quantity, values in _series(trace, rank):
        if len(values) >= MIN_VALUES:
            compared.append(quantity)
        is_rate = quantity != "iteration_time"
        scale = capacity_bytes(trace, rank) if quantity == "free_memory" and rank is not None else None
        change = find_change(values.to_numpy(np.float64), -1 if is_rate else 1, _MIN_SHARES[quantity], scale)
        if change is None or (quantity == "free_memory" and not _keeps_falling(trace, rank, values)):
            continue
        drifts.append(
            Drift(
                quantity=quantity,
                rank=rank,
                before=change.before,
                after=change.after,
                first=float(values.index[change.position]),
                counts_iterations=bool(steady_iterations(trace).numbers),
                is_gradual=change.is_gradual,
                mean_change=change.mean_change,
            )
        )
    return RankDrifts(drifts, compared)


def compared_quantities(trace: Trace) -> list[str]:
    """Return the quantities of which a trace has enough values to compare."""
    ranks = (None, *trace.ranks)
    return list(dict.fromkeys(quantity for rank in ranks for quantity in rank_drifts(trace, rank).compared))


def _keeps_falling(trace: Trace, rank: int | None, free: pd.Series[float]) -> bool:
    """Return whether free memory falls because tensors take more, or falls to the end of the run.

    What torch has reserved, and what it has of the device, never shrinks by itself. In a healthy job with batches of
    several sizes it rises whenever a batch is the largest so far: ever more rarely."""
    pool, capacity = peak_pool(trace), capacity_bytes(trace, rank or 0)
    tensors = "allocated" if pool == "device" else pool
    used = phase_peaks(trace, rank or 0, tensors or "").frame.max(axis=1).reindex(free.index).dropna()
    if len(used):
        return find_change(used.to_numpy(np.float64), 1, _MIN_SHARES["free_memory"], capacity) is not None
    third = len(free) // 3
    return bool(free.iloc[-third] - free.iloc[-1] > _MIN_SHARE_AT_END * (free.iloc[:third].median() - free.iloc[-1]))


def _share(drift: Drift) -> float:
    return abs(drift.after - drift.before) / max(abs(drift.before), 1e-9)


def _series(trace: Trace, rank: int | None) -> Iterator[tuple[str, pd.Series[float]]]:
    """Yield each quantity with its values, by iteration or by ms from the beginning of the trace."""
    numbers = steady_iterations(trace).numbers
    if rank is None:
        if numbers:
            yield "iteration_time", slowest_times(trace).frame["iteration"].dropna()
        return
    if len(trace.columns(rank, "link")):
        yield "link_speed", _per_iteration(trace, rank, _link_speeds(trace, rank))
    if not numbers:
        return
    if len(trace.columns(rank, "transfers")):
        for group in _copy_rates(trace, rank):
            yield "copy_rate", _per_iteration(trace, rank, group)
    if len(trace.columns(rank, "gpu")):
        yield "sm_clock", _per_iteration(trace, rank, _clocks(trace, rank))
    pool, capacity = free_pool(trace), capacity_bytes(trace, rank)
    if pool is not None and capacity is not None:
        peaks = phase_peaks(trace, rank, pool).frame.max(axis=1).dropna()
        yield "free_memory", (capacity - peaks[peaks.index.isin(numbers)]).astype("float64")


def _copy_rates(trace: Trace, rank: int) -> list[pd.DataFrame]:
    """Return t_ns and value of each kind of large copies: the rate of a copy, bytes/s."""
    rows = copies(trace, rank, None)
    rows = rows.only((rows.bytes >= _LARGE_BYTES) & (rows.ends > rows.starts))
    rates = pd.DataFrame({"t_ns": rows.starts, "value": rows.bytes / (rows.ends - rows.starts) * 1e9})
    kinds = [rows.directions, np.where(rows.host_memory == None, "", rows.host_memory)]  # noqa: E711
    return [group for _, group in rates.groupby(kinds)]


def _link_speeds(trace: Trace, rank: int) -> pd.DataFrame:
    """Return t_ns and value: the bytes/s that a link can carry, in samples with traffic."""
    rows = trace.link(rank)
    rows = rows[rows["generation"].notna() & rows["width"].notna()]
    rows = rows[rows["device"] == main_device(trace, rank)]
    kinds = rows.groupby(["generation", "width"])
    speed_of_kind = {kind: link_peak_bytes_per_s(int(kind[0]), int(kind[1])) or np.nan for kind in kinds.groups}
    speeds = kinds.ngroup().map(dict(enumerate(speed_of_kind.values()))).astype("float64")
    moved = rows[["h2d_bytes_per_s", "d2h_bytes_per_s"]].max(axis=1).fillna(0.0)
    # Where only the state of the link was sampled, nothing shows load.
    return rows[["t_ns"]].assign(value=speeds)[moved >= _LOADED_LINK_SHARE * speeds]


def _clocks(trace: Trace, rank: int) -> pd.DataFrame:
    """Return t_ns and value: the SM clock in samples in which the GPU is busy."""
    rows = trace.gpu(rank)
    rows = rows[(rows["device"] == main_device(trace, rank)) & rows["sm_clock_mhz"].notna()]
    rows = rows[rows["utilization_percent"] >= _LOADED_GPU_PERCENT]
    return rows[["t_ns"]].assign(value=rows["sm_clock_mhz"])


def _per_iteration(trace: Trace, rank: int, samples: pd.DataFrame) -> pd.Series[float]:
    """Return the median of the samples of each steady iteration; of a trace without iterations, each sample."""
    samples = samples.dropna(subset="value")
    spans = intervals(trace, rank).spans
    spans = spans[spans["iteration"].isin(steady_iterations(trace).numbers)]
    times: Ints = samples["t_ns"].to_numpy(np.int64)
    if spans.empty:
        span = trace.span_ns()
        begin = 0 if span is None else span[0]
        return pd.Series(samples["value"].to_numpy(np.float64), index=(times - begin) / 1e6)
    index = np.searchsorted(spans["start_ns"].to_numpy(np.int64), times, side="right") - 1
    inside = (index >= 0) & (times < spans["end_ns"].to_numpy(np.int64)[index])
    numbers = spans["iteration"].to_numpy(np.int64)[index[inside]]
    return samples["value"][inside].groupby(numbers).median().astype("float64")
