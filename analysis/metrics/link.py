"""Measures how the link between host and device was used, per direction and phase, and the copies of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult, to_frame
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import first_device, link_peak, main_device
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copied_iterations, copies, traffic
from ebbtide.analysis.metrics.phases import link_table, whole_link_table
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class PhaseLink:
    """One direction of the link in one phase: medians over the steady iterations, None if not recorded."""

    rank: int
    # The phase, or `other`; None for the whole of a trace without iterations, from its first to its last record.
    phase: str | None
    direction: str  # `h2d` or `d2h`.
    bytes: float | None  # Bytes moved.
    busy_ms: float | None  # Time in which copies ran.
    both_ms: float | None  # Time in which copies ran in both directions at once.
    mean_bytes_per_s: float | None  # Rate over the whole phase.
    busy_bytes_per_s: float | None  # Rate over `busy_ms`.
    share_of_peak: float | None  # `mean_bytes_per_s` as a share of the link's peak.


@dataclass(frozen=True)
class CopyKind:
    """All copies of a rank in one direction from or to one kind of host memory, over the whole trace.

    The driver stages a pageable copy through a buffer: it is slower, and the host waits for it.
    """

    rank: int
    direction: str  # `h2d` or `d2h`.
    host_memory: str | None  # `pinned`, `pageable`, or None if not recorded.
    count: int  # Number of copies.
    bytes: int | None  # Bytes of the copies whose size was recorded; None if there is none.
    busy_ms: float  # Time in which at least one of them ran.
    busy_bytes_per_s: float | None  # Rate over `busy_ms`.


@dataclass(frozen=True)
class RankLink:
    """The source of a rank's figures."""

    rank: int
    source: str | None  # `copies`, the name of a counter, or None where nothing was recorded.
    peak_bytes_per_s: float | None  # Peak rate of the link in one direction.
    # Per direction the number of samples left out because no link has such rates; also `false_samples` in JSON.
    rejected_samples: dict[str, int]
    missing: str | None  # Why the sampler has recorded nothing; None where it has, or where the reason is not known.


@dataclass(frozen=True, repr=False)
class LinkUse(TabularResult):
    """Link use of every rank.

    Attributes:
        ranks: Where each rank's figures come from.
        phases: An entry per rank, phase and direction.
        copies: An entry per rank, direction and kind of host memory.
    """

    ranks: list[RankLink]
    phases: list[PhaseLink]
    copies: list[CopyKind]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide summary --by link --json` prints."""
        printed = asdict(self)
        for entry in printed["ranks"]:
            # The former name of the key.
            entry["false_samples"] = entry["rejected_samples"]
        return printed

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per rank, phase and direction, with the fields of `PhaseLink` as columns."""
        return to_frame(self.phases, PhaseLink)


def link_use(trace: Trace, ranks: Sequence[int] | None = None) -> LinkUse:
    """Measure the link use of all ranks (None) or some."""
    uses = [rank_link_use(trace, rank) for rank in (trace.ranks if ranks is None else ranks)]
    phases = [phase for use in uses for phase in use.phases]
    parts = (None, *ITERATION_PARTS)
    phases.sort(key=lambda use: (use.rank, parts.index(use.phase), DIRECTIONS.index(use.direction)))
    return LinkUse(
        [entry for use in uses for entry in use.ranks], phases, [kind for use in uses for kind in use.copies]
    )


@once_per_trace
def rank_link_use(trace: Trace, rank: int) -> LinkUse:
    """Measure the link use of one rank."""
    iterations = steady_iterations(trace).numbers
    moved = {direction: traffic(trace, rank, direction) for direction in DIRECTIONS}
    rejected = {direction: m.rejected_samples if m is not None else 0 for direction, m in moved.items()}
    peak = link_peak(trace, rank)
    missing = first_device(trace, rank).link_missing
    entry = RankLink(rank, _source(trace, rank), peak, rejected, missing)
    table = link_table(trace, rank) if iterations else whole_link_table(trace, rank)
    table = table[table["iteration"].isin(iterations)] if iterations else table
    phases = [
        _phase_link(rank, str(phase) or None, str(direction), rows, peak)
        for (phase, direction), rows in table.groupby(["phase", "direction"])
    ]
    return LinkUse([entry], phases, _copy_kinds(trace, rank))


def _source(trace: Trace, rank: int) -> str | None:
    if trace.rank(rank).transfers_recorded:
        return "copies"
    rows = trace.link(rank)
    sources = rows.loc[rows["device"] == main_device(trace, rank), "source"].unique()
    return ", ".join(sorted(sources)) if len(sources) else None


def _phase_link(rank: int, phase: str | None, direction: str, rows: pd.DataFrame, peak: float | None) -> PhaseLink:
    seconds, busy = rows["length_ms"] / 1e3, rows["busy_ms"] / 1e3
    mean = median_or_none(rows["bytes"] / seconds.where(seconds > 0))
    return PhaseLink(
        rank=rank,
        phase=phase,
        direction=direction,
        bytes=median_or_none(rows["bytes"]),
        busy_ms=median_or_none(rows["busy_ms"]),
        both_ms=median_or_none(rows["both_ms"]),
        mean_bytes_per_s=mean,
        busy_bytes_per_s=median_or_none(rows["bytes"] / busy.where(busy > 0)),
        share_of_peak=mean / peak if mean is not None and peak else None,
    )


def _copy_kinds(trace: Trace, rank: int) -> list[CopyKind]:
    kinds = []
    for direction in DIRECTIONS:
        rows = copies(trace, rank, direction)
        for host, group in rows.groupby(rows["host_memory"].fillna("")):
            sized = group["bytes"].dropna()
            busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
            size = int(sized.sum()) if len(sized) else None
            rate = size / (busy / 1e9) if size is not None and busy else None
            kinds.append(CopyKind(rank, direction, str(host) or None, len(group), size, busy / 1e6, rate))
    return kinds


@dataclass(frozen=True)
class CopyStats:
    """Copies of one kind, means over the steady iterations."""

    count: int  # Copies per iteration.
    bytes: float | None  # Bytes per iteration of the copies whose size was recorded; None if there is none.
    busy_ms: float  # Time per iteration in which at least one of them ran.


def steady_copies(trace: Trace) -> pd.DataFrame:
    """Return the copies of each rank in its `copied_iterations`: the table `transfers` with rank, phase, iteration."""
    tables: list[pd.DataFrame] = []
    for rank in trace.ranks:
        rows = copies(trace, rank, None)
        if rows.empty and tables:
            continue
        phases = intervals(trace, rank).with_other
        # The stable sort keeps a phase without length before the phase that begins with it.
        phases = phases.sort_values("start_ns", kind="stable", ignore_index=True)
        index = np.searchsorted(phases["start_ns"].to_numpy(), rows["start_ns"].to_numpy(), side="right") - 1
        rows, index = rows[index >= 0], index[index >= 0]
        inside = rows["start_ns"].to_numpy() < phases["end_ns"].to_numpy()[index]
        own = phases.iloc[index].reset_index(drop=True)
        rows = rows.reset_index(drop=True).assign(rank=rank, phase=own["phase"], iteration=own["iteration"])
        tables.append(rows[inside & rows["iteration"].isin(copied_iterations(trace, rank))])
    return pd.concat(tables)


def copy_stats(
    trace: Trace, rows: pd.DataFrame, direction: str, host_memory: str, phase: str | None = None
) -> CopyStats | None:
    """Return the copies of one kind among `steady_copies`, in a phase or (None) in all, of the rank on which they took
    longest."""
    rows = rows[(rows["direction"] == direction) & (rows["host_memory"] == host_memory)]
    if phase is not None:
        rows = rows[rows["phase"] == phase]
    stats = []
    for rank, group in rows.groupby("rank"):
        busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
        count, sized = len(copied_iterations(trace, int(rank))), group["bytes"].dropna()
        size = int(sized.sum()) / count if len(sized) else None
        stats.append(CopyStats(round(len(group) / count), size, busy / 1e6 / count))
    return max(stats, key=lambda kind: kind.busy_ms, default=None)
