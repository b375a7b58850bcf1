"""Figures of a rank over the last iterations, and counters since the beginning.

The beginning is when the recording began.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    link_peak,
    main_device,
    memory_timeline,
)
from ebbtide.analysis.metrics.iterations import (
    durations_ms,
    intervals,
    steady_iterations,
)
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, moved_bytes
from ebbtide.analysis.metrics.phases import phase_peaks
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.phases import ITERATION_PARTS, OTHER, PHASES
from ebbtide.profiler.recording.spools.process_tail import PhaseCounts
from ebbtide.profiler.trace import Trace

# recording: its process runs. silent: it runs, but has recorded nothing for long.
# stopped: it has closed its recording. ended: the process has ended. complete: the
# trace is finished.
RankState = Literal["recording", "silent", "stopped", "ended", "complete"]


@dataclass(frozen=True)
class LiveMemory:
    """Memory of a rank's first device, by the pool behind free memory.

    Free memory is computed from it.
    """

    pool: str
    bytes: int  # Its newest value.
    capacity_bytes: int | None  # Memory of the device; None if it is not known.
    # Phase, or `other` -> median over the iterations of its largest value.
    peak_bytes: dict[str, int]
    # Phase, or `other` -> median over the iterations of capacity - largest value; empty
    # without a capacity.
    min_free_bytes: dict[str, int]
    # Least free memory at any moment of the iterations; None without a capacity.
    lowest_free_bytes: int | None

    @property
    def free_bytes(self) -> int | None:
        """Free memory now; None without a capacity."""
        return (
            None
            if self.capacity_bytes is None
            else max(self.capacity_bytes - self.bytes, 0)
        )


@dataclass(frozen=True)
class LiveLink:
    """One direction of a rank's link: its newest sample."""

    bytes_per_s: float  # Rate.
    # Peak of the link in one direction; None if it is not known.
    peak_bytes_per_s: float | None

    @property
    def share(self) -> float | None:
        """Rate as a share of the peak; None without a peak."""
        return (
            self.bytes_per_s / self.peak_bytes_per_s if self.peak_bytes_per_s else None
        )


@dataclass(frozen=True)
class LiveRank:
    """Figures of one rank. Medians are over the last iterations, without the warm-up of
    the job."""

    rank: int
    device: str | None  # Name of its first device, `cuda:0` or `cpu`.
    device_name: str | None  # Model of the device; None if it is not known.
    state: RankState  # See `RankState`.
    # Number of the newest finished iteration; None before the first.
    iteration: int | None
    # `iteration`, a phase or `other` -> milliseconds in the newest finished iteration.
    last_ms: dict[str, float] = field(default_factory=dict)
    # The same, median over the last iterations.
    median_ms: dict[str, float] = field(default_factory=dict)
    memory: LiveMemory | None = None  # Memory; None where it was not recorded.
    # `h2d` or `d2h` -> the link; without a direction that was not sampled.
    link: dict[str, LiveLink] = field(default_factory=dict)
    # Column of the table `gpu` (`power_w`, ...) -> its newest value, of those that the
    # card gives.
    gpu: dict[str, float] = field(default_factory=dict)


def rank_figures(trace: Trace, rank: int, state: RankState) -> LiveRank:
    """Measure one rank of a trace that has been cut to its last iterations."""
    table = durations_ms(intervals(trace, rank)).frame
    steady = table[table.index.isin(steady_iterations(trace).numbers)]
    last = table.iloc[-1] if len(table) else pd.Series(dtype=float)
    device = trace.rank(rank).main_device
    rates = _newest(trace, rank, trace.link(rank))
    link = {
        d: LiveLink(rates[name], link_peak(trace, rank))
        for d in DIRECTIONS
        if (name := f"{d}_bytes_per_s") in rates
    }
    return LiveRank(
        rank=rank,
        device=main_device(trace, rank),
        device_name=device.name,
        state=state,
        iteration=int(table.index[-1]) if len(table) else None,
        last_ms={str(part): float(ms) for part, ms in last.items() if not np.isnan(ms)},
        median_ms={
            str(part): ms
            for part in steady
            if (ms := median_or_none(steady[part])) is not None
        },
        memory=_memory(trace, rank),
        link=link,
        gpu=_newest(trace, rank, trace.gpu(rank)),
    )


def _memory(trace: Trace, rank: int) -> LiveMemory | None:
    pool = free_pool(trace)
    _, sizes = memory_timeline(trace, rank, pool or "")
    if pool is None or not len(sizes):
        return None
    capacity = capacity_bytes(trace, rank)
    peaks = phase_peaks(trace, rank, pool).frame
    peaks = peaks[peaks.index.isin(steady_iterations(trace).numbers)]
    of_phase = {
        phase: round(peak)
        for phase in ITERATION_PARTS
        if (peak := median_or_none(peaks[phase])) is not None
    }
    largest = peaks.max(axis=None) if len(peaks) else np.nan
    largest = float(sizes.max()) if np.isnan(largest) else float(largest)
    return LiveMemory(
        pool=pool,
        bytes=int(sizes[-1]),
        capacity_bytes=capacity,
        peak_bytes=of_phase,
        min_free_bytes={}
        if capacity is None
        else {phase: capacity - peak for phase, peak in of_phase.items()},
        lowest_free_bytes=None
        if capacity is None
        else max(capacity - round(largest), 0),
    )


def _newest(trace: Trace, rank: int, samples: pd.DataFrame) -> dict[str, float]:
    """Return the newest value of each column of samples of a rank's first device.

    Columns without a value are left out.
    """
    rows = (
        samples[samples["device"] == main_device(trace, rank)]
        .select_dtypes("number")
        .drop(columns="t_ns")
    )
    recorded = {str(column): rows[column].dropna() for column in rows}
    return {
        column: float(values.iloc[-1])
        for column, values in recorded.items()
        if len(values)
    }


@dataclass(frozen=True)
class RankTotals:
    """Sums over all finished iterations of a rank, the warm-up included."""

    iterations: int  # Number of finished iterations.
    iteration_s: float  # Their time in seconds.
    # Phase, or `other` -> its seconds; a phase that no iteration has is missing.
    phase_s: dict[str, float]
    # Phase, or `other` -> the number of iterations that have it.
    phase_iterations: dict[str, int]
    # `h2d` or `d2h` -> bytes moved since the recording began; None where they were not
    # recorded.
    link_bytes: dict[str, int | None]


def rank_totals(counts: PhaseCounts, link_bytes: dict[str, int | None]) -> RankTotals:
    """Return totals with `other`: the time of iterations in which no phase ran."""
    iteration_s = counts.iteration_ns / 1e9
    numbers = {
        phase: number for phase, number in counts.phase_iterations.items() if number
    }
    phase_s = {phase: counts.phase_ns[phase] / 1e9 for phase in numbers}
    if counts.iterations:
        phase_s[OTHER] = max(0.0, iteration_s - sum(phase_s.values()))
        numbers[OTHER] = counts.iterations
    return RankTotals(counts.iterations, iteration_s, phase_s, numbers, link_bytes)


def totals_of_trace(trace: Trace, rank: int) -> RankTotals:
    """Return the totals of a trace from its tables."""
    times = intervals(trace, rank)
    table = durations_ms(times).frame
    runs = times.phases.groupby("phase")["iteration"].nunique()
    phase_ns = {
        phase: round(table[phase].sum() * 1e6) for phase in PHASES if phase in runs
    }
    of_host = intervals(trace, rank, device_times=False).spans
    length_ns = (
        0
        if of_host.empty
        else int(of_host["end_ns"].iloc[-1] - of_host["start_ns"].iloc[0])
    )
    counts = PhaseCounts(
        len(table), length_ns, phase_ns, {phase: int(runs[phase]) for phase in phase_ns}
    )
    return rank_totals(
        counts,
        {direction: moved_bytes(trace, rank, direction) for direction in DIRECTIONS},
    )
