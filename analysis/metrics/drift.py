"""Compares a run with its own beginning, to find iteration times, links, clocks, free
memory and host memory that drift."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    main_device,
    peak_pool,
    ran_on_cpu,
)
from ebbtide.analysis.metrics.iterations import (
    intervals,
    slowest_times,
    steady_iterations,
)
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copies
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.metrics.ranks.rank_series import medians_within, rank_series
from ebbtide.analysis.timeseries.change_point import (
    MIN_VALUES,
    LevelChange,
    find_change,
)
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.sampler.pcie import link_peak_bytes_per_s
from ebbtide.profiler.trace import Trace

# Smaller changes are not reported. Free memory counts as a share of the capacity: 0.5 %
# are 0.4 GiB of 80.
_MIN_SHARES = {
    "iteration_time": 0.05,
    "link_speed": 0.1,
    "copy_rate": 0.1,
    "sm_clock": 0.05,
    "free_memory": 0.005,
    "rss": 0.02,
    "pinned": 0.02,
    "cgroup": 0.02,
}
# Pools of host memory that a job with a GPU may fill. What its control group uses is
# compared where the process itself does not grow: workers of data loaders do.
_HOST_POOLS = ("rss", "pinned", "cgroup")
# Idle links drop to generation 1: samples count from this share of what the link then
# can carry.
_LOADED_LINK_SHARE = 0.02
# Of a steady loss of memory, a third is in the last third of the run. Caches that fill
# ever more slowly have less there: of the logarithm of time it is 0.23.
_MIN_SHARE_AT_END, _MIN_HOST_SHARE_AT_END = 0.2, 0.3
# A process grows a little by itself.
_MIN_HOST_BYTES = 64 << 20
_END_VALUES = 3
# Copies of at least this size measure a link's rate.
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Drift:
    """A quantity that is worse at the end of a run than at its beginning."""

    # `iteration_time` (ms), `link_speed` (bytes/s that generation and lanes allow, in
    # samples with traffic), `copy_rate` (bytes/s of copies of 1 MiB or more),
    # `sm_clock` (MHz, in samples with a utilization of 50 % or more), `free_memory`
    # (least bytes of an iteration), or `rss`, `pinned` or `cgroup` (most bytes of an
    # iteration in a pool of host memory).
    quantity: str
    # The rank where it changes most; None for the iteration time, which is the slowest
    # rank's.
    rank: int | None
    # The first iteration after the change, or the first sample's ms from the beginning
    # of the trace.
    first: float
    counts_iterations: bool  # Whether `first` is an iteration.
    before: float  # Median before the change began.
    after: float  # Median of the last third.
    is_gradual: bool  # Whether a line fits the values better than a step.
    # Mean change over all values, which is smaller than after - before where it began
    # late.
    mean_change: float


def find_drifts(trace: Trace) -> list[Drift]:
    """Find the quantities that become worse during a run.

    `find_change` finds changes among their medians of the steady iterations (for links
    and clocks, of samples under load). Without iterations only the speed of the link is
    compared, over samples: memory that grows while a job starts is no drift.
    """
    drifts: dict[str, Drift] = {}
    for drift in (
        drift
        for rank in (None, *trace.ranks)
        for drift in rank_drifts(trace, rank).drifts
    ):
        worst = drifts.get(drift.quantity)
        if worst is None or _share(drift) > _share(worst):
            drifts[drift.quantity] = drift
    return list(drifts.values())


class RankDrifts(NamedTuple):
    """The drifts of a rank, and the quantities with enough values to compare."""

    drifts: list[Drift]
    compared: list[str]


@once_per_trace
def rank_drifts(trace: Trace, rank: int | None) -> RankDrifts:
    """Compare a rank, or the slowest one, with its beginning.

    With None, it is the iteration time of the slowest rank.
    """
    drifts: list[Drift] = []
    compared: list[str] = []
    numbers = steady_iterations(trace).numbers
    if 0 < len(numbers) < MIN_VALUES:
        return RankDrifts(drifts, compared)
    for quantity, at, values in (*_series(trace, rank), *_host_series(trace, rank)):
        if quantity == "cgroup" and any(one.quantity == "rss" for one in drifts):
            continue
        if len(values) >= MIN_VALUES:
            compared.append(quantity)
        is_memory = quantity == "free_memory"
        scale = capacity_bytes(trace, rank) if is_memory and rank is not None else None
        is_host = quantity in _HOST_POOLS
        change = find_change(
            values,
            1 if is_host or quantity == "iteration_time" else -1,
            _MIN_SHARES[quantity],
            scale,
        )
        if (
            change is not None
            and (not is_host or _keeps_growing(values, change))
            and (
                not is_memory
                or _keeps_falling(trace, rank, at.astype(np.int64), values)
            )
        ):
            drifts.append(
                Drift(
                    quantity,
                    rank,
                    float(at[change.position]),
                    bool(numbers),
                    *change[1:],
                )
            )
    return RankDrifts(drifts, compared)


def compared_quantities(trace: Trace) -> list[str]:
    """Return the quantities with enough values in a trace to compare."""
    ranks = (None, *trace.ranks)
    return list(
        dict.fromkeys(
            quantity for rank in ranks for quantity in rank_drifts(trace, rank).compared
        )
    )


def _keeps_falling(trace: Trace, rank: int | None, numbers: Ints, free: Floats) -> bool:
    """Return whether free memory falls for a lasting reason.

    Tensors take more, or it falls to the end of the run. What torch has reserved never
    shrinks by itself: in a healthy job it rises whenever a batch is the largest so far,
    ever more rarely.
    """
    pool, capacity = peak_pool(trace), capacity_bytes(trace, rank or 0)
    tensors = "allocated" if pool == "device" else pool
    used = (
        phase_peaks(trace, rank or 0, tensors or "")
        .at(numbers)
        .largest(ITERATION_PARTS)
    )
    used = used[~np.isnan(used)]
    if len(used):
        return find_change(used, 1, _MIN_SHARES["free_memory"], capacity) is not None
    third = len(free) // 3
    return bool(
        free[-third] - free[-1]
        > _MIN_SHARE_AT_END * (np.median(free[:third]) - free[-1])
    )


def _keeps_growing(values: Floats, change: LevelChange) -> bool:
    """Return whether host memory grows by much, and to the end of the run.

    It jumps in sound jobs, too: at checkpoints, and when buffers are made.
    """
    total = change.after - change.before
    third = len(values) // 3
    end, before_end = (
        float(np.median(values[at - _END_VALUES : at]))
        for at in (len(values), len(values) - third)
    )
    at_end = end - before_end
    is_large = total >= _MIN_HOST_BYTES
    return is_large and at_end > _MIN_HOST_SHARE_AT_END * (end - change.before)


def _share(drift: Drift) -> float:
    return abs(drift.after - drift.before) / max(abs(drift.before), 1e-9)


def _series(trace: Trace, rank: int | None) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield each quantity with the iterations and its values.

    In a trace without iterations, yield ms from its beginning instead.
    """
    numbers = steady_iterations(trace).numbers
    if rank is None:
        if numbers:
            slowest = slowest_times(trace)
            yield (
                "iteration_time",
                *_recorded(slowest.numbers, slowest.columns["iteration"]),
            )
        return
    if len(trace.columns(rank, "link")):
        yield "link_speed", *_per_iteration(trace, rank, *_link_speeds(trace, rank))
    if not numbers:
        return
    for times, rates in _copy_rates(trace, rank):
        yield "copy_rate", *_per_iteration(trace, rank, times, rates)
    series = rank_series(trace, rank)
    if len(trace.columns(rank, "gpu")):
        yield "sm_clock", *_recorded(series.numbers, series.columns["sm_clock_mhz"])
    if free_pool(trace) is not None and capacity_bytes(trace, rank) is not None:
        yield "free_memory", *_recorded(series.numbers, series.columns["free_bytes"])


def _host_series(
    trace: Trace, rank: int | None
) -> Iterator[tuple[str, Floats, Floats]]:
    """Yield each pool of host memory of a job with a GPU, with the iterations and its
    values.

    On the CPU free memory says the same.
    """
    numbers = steady_iterations(trace).numbers
    if rank is None or not numbers or ran_on_cpu(trace):
        return
    recorded = trace.labels(rank, "memory", "pool")
    at = np.array(numbers, np.int64)
    for pool in _HOST_POOLS:
        if pool in recorded:
            peaks = phase_peaks(trace, rank, pool).at(at).largest(ITERATION_PARTS)
            yield pool, *_recorded(at, peaks)


def _recorded(at: Ints | Floats, values: Floats) -> tuple[Floats, Floats]:
    recorded = ~np.isnan(values)
    return at[recorded].astype(np.float64), values[recorded]


def _copy_rates(trace: Trace, rank: int) -> Iterator[tuple[Ints, Floats]]:
    """Yield the starts, ns, and the rates, bytes/s, of each kind of large copies."""
    rows = copies(trace, rank, None)
    rows = rows.only((rows.bytes >= _LARGE_BYTES) & (rows.ends > rows.starts))
    for direction, kind in sorted(
        {*zip(rows.directions, rows.host_memory, strict=True)}, key=str
    ):
        own = rows.only((rows.directions == direction) & (rows.host_memory == kind))
        yield own.starts, own.bytes / (own.ends - own.starts) * 1e9


def _link_speeds(trace: Trace, rank: int) -> tuple[Ints, Floats]:
    """Return the times (ns) of samples with traffic, and the bytes/s that the link can
    carry at each."""
    rows = trace.columns(rank, "link")
    states = np.stack([rows.floats("generation"), rows.floats("width")], axis=1)
    own = rows.equal("device", main_device(trace, rank)) & ~np.isnan(states).any(axis=1)
    kinds, kind = np.unique(states[own], axis=0, return_inverse=True)
    peaks = [
        link_peak_bytes_per_s(int(generation), int(width)) or np.nan
        for generation, width in kinds
    ]
    speeds = np.array(peaks, np.float64)[kind.ravel()]
    rates = np.stack(
        [rows.floats(f"{direction}_bytes_per_s")[own] for direction in DIRECTIONS]
    )
    # Where only the state of the link was sampled, nothing shows load.
    loaded = np.nan_to_num(rates).max(axis=0) >= _LOADED_LINK_SHARE * speeds
    return rows.ints("t_ns")[own][loaded], speeds[loaded]


def _per_iteration(
    trace: Trace, rank: int, times: Ints, values: Floats
) -> tuple[Floats, Floats]:
    """Return the median of the samples of each steady iteration.

    For a trace without iterations, return each sample.
    """
    spans = intervals(trace, rank)
    steady = np.isin(spans.numbers, steady_iterations(trace).numbers)
    if not steady.any():
        return _recorded((times - (trace.span_ns() or (0, 0))[0]) / 1e6, values)
    medians = medians_within(times, values, spans.starts[steady], spans.ends[steady])
    return _recorded(spans.numbers[steady], medians)
