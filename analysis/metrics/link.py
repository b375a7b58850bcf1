"""Measures the use of the link between host and device by direction and phase, and the
copies of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import first_device, link_peak, main_device
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    Copies,
    copied_iterations,
    copies,
    traffic,
)
from ebbtide.analysis.metrics.phases import link_table, whole_link_table
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, union_length
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools


@dataclass(frozen=True)
class PhaseLink:
    """One direction of the link in one phase.

    Figures are medians over the steady iterations, None if not recorded.
    """

    rank: int
    # The phase, or `other`; None for the whole of a trace without iterations, from its
    # first to its last record.
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
    """All copies of a rank between the device and one kind of host memory, in one
    direction, over the whole trace.

    The driver stages a pageable copy through a buffer: it is slower, and the host waits
    for it.
    """

    rank: int
    direction: str  # `h2d` or `d2h`.
    host_memory: str | None  # `pinned`, `pageable`, or None if not recorded.
    count: int  # Number of copies.
    # Bytes of the copies whose size was recorded; None if there is none.
    bytes: int | None
    busy_ms: float  # Time in which at least one of them ran.
    busy_bytes_per_s: float | None  # Rate over `busy_ms`.


@dataclass(frozen=True)
class RankLink:
    """The source of a rank's figures."""

    rank: int
    # `copies`, the name of a counter, or None where nothing was recorded.
    source: str | None
    peak_bytes_per_s: float | None  # Peak rate of the link in one direction.
    # Per direction the number of samples left out because no link has such rates; also
    # `false_samples` in JSON.
    rejected_samples: dict[str, int]
    # Why the sampler has recorded nothing; None where it has, or where the reason is
    # not known.
    missing: str | None


@dataclass(frozen=True, repr=False)
class LinkUse(TabularResult, table="phases"):
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


def link_use(trace: Trace, ranks: Sequence[int] | None = None) -> LinkUse:
    """Measure the link use of some ranks, or of all if None."""
    uses = [
        rank_link_use(trace, rank) for rank in (trace.ranks if ranks is None else ranks)
    ]
    phases = [phase for use in uses for phase in use.phases]
    parts = (None, *ITERATION_PARTS)
    phases.sort(
        key=lambda use: (
            use.rank,
            parts.index(use.phase),
            DIRECTIONS.index(use.direction),
        )
    )
    return LinkUse(
        [entry for use in uses for entry in use.ranks],
        phases,
        [kind for use in uses for kind in use.copies],
    )


@once_per_trace
def rank_link_use(trace: Trace, rank: int) -> LinkUse:
    """Measure the link use of one rank."""
    iterations = steady_iterations(trace).numbers
    moved = {direction: traffic(trace, rank, direction) for direction in DIRECTIONS}
    rejected = {
        direction: m.rejected_samples if m is not None else 0
        for direction, m in moved.items()
    }
    peak = link_peak(trace, rank)
    missing = first_device(trace, rank).link_missing
    entry = RankLink(rank, _source(trace, rank), peak, rejected, missing)
    table = (
        link_table(trace, rank, iterations)
        if iterations
        else whole_link_table(trace, rank)
    )
    phases = [
        _phase_link(rank, phase or None, direction, columns, peak)
        for phase, direction, columns in table.of_phases()
    ]
    return LinkUse([entry], phases, _copy_kinds(trace, rank))


def _source(trace: Trace, rank: int) -> str | None:
    if trace.rank(rank).transfers_recorded:
        return "copies"
    rows = trace.columns(rank, "link")
    sources = {*rows.texts("source")[rows.equal("device", main_device(trace, rank))]}
    return ", ".join(sorted(sources)) if sources else None


def _phase_link(
    rank: int,
    phase: str | None,
    direction: str,
    columns: dict[str, Floats],
    peak: float | None,
) -> PhaseLink:
    mean = median_or_none(_rates(columns["bytes"], columns["length_ms"]))
    return PhaseLink(
        rank=rank,
        phase=phase,
        direction=direction,
        bytes=median_or_none(columns["bytes"]),
        busy_ms=median_or_none(columns["busy_ms"]),
        both_ms=median_or_none(columns["both_ms"]),
        mean_bytes_per_s=mean,
        busy_bytes_per_s=median_or_none(_rates(columns["bytes"], columns["busy_ms"])),
        share_of_peak=mean / peak if mean is not None and peak else None,
    )


def _rates(sizes: Floats, lengths_ms: Floats) -> Floats:
    """Return bytes/s; NaN where the length is 0."""
    seconds = lengths_ms / 1e3
    rates: Floats = sizes / np.where(seconds > 0, seconds, np.nan)
    return rates


def _copy_kinds(trace: Trace, rank: int) -> list[CopyKind]:
    kinds = []
    for direction in DIRECTIONS:
        rows = copies(trace, rank, direction)
        for host in sorted({*rows.host_memory}, key=lambda host: host or ""):
            own = rows.only(rows.host_memory == host)
            busy, size = union_length(own.starts, own.ends), own.total_bytes
            rate = size / (busy / 1e9) if size is not None and busy else None
            kinds.append(
                CopyKind(rank, direction, host, len(own.starts), size, busy / 1e6, rate)
            )
    return kinds


@dataclass(frozen=True)
class CopyStats:
    """Copies of one kind, means over the steady iterations."""

    count: int  # Copies per iteration.
    # Bytes per iteration of the copies whose size was recorded; None if there is none.
    bytes: float | None
    busy_ms: float  # Time per iteration in which at least one of them ran.


class SteadyCopies(NamedTuple):
    """Copies of each rank in its `copied_iterations` as columns with an entry each, in
    order of rank and time."""

    ranks: Ints
    phases: npt.NDArray[np.object_]
    copies: Copies

    def only(self, selected: Bools | Ints) -> SteadyCopies:
        return SteadyCopies(
            self.ranks[selected], self.phases[selected], self.copies.only(selected)
        )

    def by_rank(self) -> Iterator[tuple[int, Copies]]:
        """Yield each rank with its copies."""
        edges = np.flatnonzero(np.diff(self.ranks, prepend=-1)).tolist()
        for start, end in pairwise([*edges, len(self.ranks)]):
            yield (
                int(self.ranks[start]),
                Copies._make(values[start:end] for values in self.copies),
            )


def steady_copies(trace: Trace) -> SteadyCopies:
    """Return the copies of each rank in its `copied_iterations`."""
    tables = [_steady_copies(trace, rank) for rank in trace.ranks]
    columns = [
        np.concatenate(values)
        for values in zip(*(table.copies for table in tables), strict=True)
    ]
    ranks, phases = (
        np.concatenate([table[index] for table in tables]) for index in (0, 1)
    )
    return SteadyCopies(ranks, phases, Copies(*columns))


@once_per_trace
def _steady_copies(trace: Trace, rank: int) -> SteadyCopies:
    rows, phases = copies(trace, rank, None), intervals(trace, rank).times_with_other
    # The stable sort keeps a phase without length before the phase that begins with it.
    phases = phases.only(np.argsort(phases.starts, kind="stable"))
    index = np.searchsorted(phases.starts, rows.starts, side="right") - 1
    ends, iterations = (
        np.append(phases.ends, 0)[index],
        np.append(phases.iterations, 0)[index],
    )
    inside = (
        (index >= 0)
        & (rows.starts < ends)
        & np.isin(iterations, copied_iterations(trace, rank))
    )
    return SteadyCopies(
        np.full(int(inside.sum()), rank),
        phases.phases[index[inside]],
        rows.only(inside),
    )


def copy_stats(
    trace: Trace,
    rows: SteadyCopies,
    direction: str,
    host_memory: str,
    phase: str | None = None,
) -> CopyStats | None:
    """Return the copies of a kind in a phase, or in all if it is None, on the rank
    where they took longest."""
    selected = (rows.copies.directions == direction) & (
        rows.copies.host_memory == host_memory
    )
    selected &= (rows.phases == phase) | (phase is None)
    stats = []
    for rank, own in rows.only(selected).by_rank():
        count, size = len(copied_iterations(trace, rank)), own.total_bytes
        busy_ms = union_length(own.starts, own.ends) / 1e6
        stats.append(
            CopyStats(
                round(len(own.starts) / count),
                None if size is None else size / count,
                busy_ms / count,
            )
        )
    return max(stats, key=lambda kind: kind.busy_ms, default=None)
