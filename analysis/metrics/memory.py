"""Memory lines side by side, and what the gaps between them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.devices import capacity_bytes, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import PHASES, counted, intervals
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between
from ebbtide.profiler.trace import Trace

# (name, the upper line, the lower line): what lies between two counts of the same memory.
GAPS = {
    "fragmentation": ("reserved", "allocated"),
    "outside torch": ("device", "reserved"),
}


@dataclass(frozen=True)
class PoolUse:
    """Bytes of a pool in one phase of a rank, over the counted iterations: the least and the most of each iteration,
    medians of them."""

    rank: int
    phase: str
    pool: str
    low_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Gap:
    """What lies between two lines: `fragmentation` (reserved - allocated), `outside torch` (device - reserved) or
    `free` (capacity - the pool that says most about the device). Like PoolUse, of the difference at each moment."""

    rank: int
    phase: str
    gap: str
    low_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Memory:
    """Pools and gaps of every rank and phase that were recorded."""

    pools: list[PoolUse]
    gaps: list[Gap]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide memory --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row per rank, phase and pool, with the fields of `PoolUse` as columns."""
        return to_frame(self.pools, PoolUse)


def memory_use(trace: Trace, ranks: Sequence[int] | None = None) -> Memory:
    """Every pool in every phase, and the gaps between those that count the same memory."""
    pools: list[PoolUse] = []
    gaps: list[Gap] = []
    iterations, _ = counted(trace)
    main = main_pool(trace)
    for rank in trace.ranks if ranks is None else ranks:
        pieces = intervals(trace, rank, device_times=False).with_other
        pieces = pieces[pieces["iteration"].isin(iterations)]
        lines = {str(pool): memory_line(trace, rank, pool) for pool in sorted(trace.memory(rank)["pool"].unique())}
        for pool, line in lines.items():
            pools += [PoolUse(rank, phase, pool, low, high) for phase, low, high in _per_phase(pieces, line)]
        between = {gap: difference(lines[a], lines[b]) for gap, (a, b) in GAPS.items() if a in lines and b in lines}
        capacity = capacity_bytes(trace, rank)
        if capacity is not None and main in lines:
            times, used = lines[main]
            between["free"] = times, np.maximum(capacity - used, 0)
        for gap, line in between.items():
            gaps += [Gap(rank, phase, gap, low, high) for phase, low, high in _per_phase(pieces, line)]
    return Memory(pools, gaps)


def difference(upper: tuple[Ints, Ints], lower: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """(times, values) of one step function less another, from where both have a value. The two count the same memory:
    where samples of different moments make the lower the higher it is 0."""
    times = np.union1d(upper[0], lower[0])
    times = times[times >= max(upper[0][0], lower[0][0])]
    values = [line[np.searchsorted(at, times, side="right") - 1] for at, line in (upper, lower)]
    return times, np.maximum(values[0] - values[1], 0)


def _per_phase(pieces: pd.DataFrame, line: tuple[Ints, Ints]) -> list[tuple[str, int, int]]:
    """(phase, low, peak) of a line over the phases of iterations, medians."""
    starts, ends = pieces["start_ns"].to_numpy(np.int64), pieces["end_ns"].to_numpy(np.int64)
    times, values = line
    peaks, lows = peak_between(times, values, starts, ends), -peak_between(times, -values, starts, ends)
    known = pieces.assign(peak=peaks, low=lows).dropna()
    by_iteration = known.groupby(["phase", "iteration"]).agg({"low": "min", "peak": "max"})
    medians = by_iteration.groupby("phase").median()
    return [
        (phase, round(medians.loc[phase, "low"]), round(medians.loc[phase, "peak"]))
        for phase in PHASES
        if phase in medians.index
    ]
