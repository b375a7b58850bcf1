"""How the link between host and device was used: per direction, phase and iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.devices import link_peak, main_device
from ebbtide.analysis.metrics.iterations import PHASES, counted
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copies, traffic
from ebbtide.analysis.metrics.phases import link_table
from ebbtide.analysis.timeseries.step_functions import union_length
from ebbtide.profiler.trace import Trace


@dataclass(frozen=True)
class PhaseLink:
    """One direction in one phase; medians over the counted iterations, None for what was not recorded.

    busy_ms: time in which copies ran. mean_bytes_per_s: over the whole phase. busy_bytes_per_s: over busy_ms.
    share_of_peak: of mean_bytes_per_s. both_ms: time in which copies ran in both directions at once.
    """

    rank: int
    phase: str
    direction: str
    bytes: float | None
    busy_ms: float | None
    both_ms: float | None
    mean_bytes_per_s: float | None
    busy_bytes_per_s: float | None
    share_of_peak: float | None


@dataclass(frozen=True)
class KindOfCopies:
    """All copies of one direction and kind of host memory (`pinned`, `pageable`, None where not told) of a rank.

    A pageable copy is staged by the driver: slower, and the host waits for it.
    """

    rank: int
    direction: str
    host_memory: str | None
    count: int
    bytes: int | None
    busy_ms: float
    busy_bytes_per_s: float | None


@dataclass(frozen=True)
class RankLink:
    """Where a rank's figures are from: `copies`, the name of a counter, or None; its peak in one direction; how many
    samples were left out because no link has such rates."""

    rank: int
    source: str | None
    peak_bytes_per_s: float | None
    false_samples: dict[str, int]


@dataclass(frozen=True)
class Link:
    """The link of every rank."""

    ranks: list[RankLink]
    phases: list[PhaseLink]
    copies: list[KindOfCopies]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide link --json` prints."""
        return asdict(self)

    def to_pandas(self) -> pd.DataFrame:
        """A row per rank, phase and direction, with the fields of `PhaseLink` as columns."""
        return to_frame(self.phases, PhaseLink)


def link_use(trace: Trace, ranks: Sequence[int] | None = None) -> Link:
    """How the link was used in each phase, by every rank."""
    entries, phases, kinds = [], [], []
    iterations, _ = counted(trace)
    for rank in trace.ranks if ranks is None else ranks:
        moved = {way: traffic(trace, rank, way) for way in DIRECTIONS}
        false = {way: found.false_samples if found is not None else 0 for way, found in moved.items()}
        peak = link_peak(trace, rank)
        entries.append(RankLink(rank, _source(trace, rank), peak, false))
        table = link_table(trace, rank)
        table = table[table["iteration"].isin(iterations)]
        for (phase, way), rows in table.groupby(["phase", "direction"]):
            phases.append(_phase_link(rank, str(phase), str(way), rows, peak))
        kinds += _kinds(trace, rank)
    phases.sort(key=lambda use: (use.rank, PHASES.index(use.phase), DIRECTIONS.index(use.direction)))
    return Link(entries, phases, kinds)


def _source(trace: Trace, rank: int) -> str | None:
    if trace.rank(rank).get("transfers_recorded"):
        return "copies"
    rows = trace.link(rank)
    sources = rows.loc[rows["device"] == main_device(trace, rank), "source"].unique()
    return ", ".join(sorted(sources)) if len(sources) else None


def _phase_link(rank: int, phase: str, direction: str, rows: pd.DataFrame, peak: float | None) -> PhaseLink:
    seconds, busy = rows["length_ms"] / 1e3, rows["busy_ms"] / 1e3
    mean = _median(rows["bytes"] / seconds.where(seconds > 0))
    return PhaseLink(
        rank=rank,
        phase=phase,
        direction=direction,
        bytes=_median(rows["bytes"]),
        busy_ms=_median(rows["busy_ms"]),
        both_ms=_median(rows["both_ms"]),
        mean_bytes_per_s=mean,
        busy_bytes_per_s=_median(rows["bytes"] / busy.where(busy > 0)),
        share_of_peak=mean / peak if mean is not None and peak else None,
    )


def _kinds(trace: Trace, rank: int) -> list[KindOfCopies]:
    kinds = []
    for way in DIRECTIONS:
        rows = copies(trace, rank, way)
        for host, group in rows.groupby(rows["host_memory"].fillna("")):
            sized = group["bytes"].dropna()
            busy = union_length(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64))
            size = int(sized.sum()) if len(sized) else None
            rate = size / (busy / 1e9) if size is not None and busy else None
            kinds.append(KindOfCopies(rank, way, str(host) or None, len(group), size, busy / 1e6, rate))
    return kinds


def _median(values: pd.Series[float]) -> float | None:
    known = values.dropna()
    return float(known.median()) if len(known) else None
