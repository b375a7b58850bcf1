"""Measures the sub-steps of an update: time, bytes, concurrent copies, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.devices import link_peak, memory_timeline, peak_pool
from ebbtide.analysis.metrics.iterations import steady_iterations
from ebbtide.analysis.metrics.link_throughput import (
    DIRECTIONS,
    busy_between,
    copies,
    traffic,
)
from ebbtide.analysis.metrics.memory_spans import memory_spans, within_spans
from ebbtide.analysis.metrics.storage_use import StorageUse, storage_use
from ebbtide.analysis.metrics.substeps.operations import (
    ON_HOST,
    remove_overlaps,
    run_in_sequence,
    split_by_phase,
)
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between
from ebbtide.phases import ITERATION_PARTS
from ebbtide.profiler.trace import Trace

# A sub-step on the host waits for pageable copies if they run for at least this share
# of its time.
_COVERED = 0.5
_HOST_MEMORY = ("pinned", "pageable")


@dataclass(frozen=True)
class ConcurrentTransfers:
    """Copies in one direction during a sub-step, with None for unrecorded figures.

    Counters give bytes only, and none for a sub-step that is shorter than the spacing
    of their samples."""

    bytes: float | None  # Bytes moved per iteration.
    busy_share: float | None  # Share of the sub-step's time in which any copy ran.
    pinned_share: float | None  # Share in which a copy from or to pinned memory ran.
    # Share in which a copy from or to pageable memory ran.
    pageable_share: float | None
    busy_bytes_per_s: float | None  # Rate while copies ran.
    share_of_peak: float | None  # `busy_bytes_per_s` as a share of the link's peak.


@dataclass(frozen=True)
class SubStep:
    """One sub-step, or kind of operation, in a phase of a rank.

    Figures are over the steady iterations that have any.
    """

    rank: int
    phase: str  # The phase, or `other`.
    name: str
    resource: str  # Where it runs: `host`, `cpu`, `gpu`, `h2d`, `d2h`.
    within: str | None  # The sub-step that it is a part of; None if it is not nested.
    subgroup: int | None  # The subgroup; None for all of them together.
    count: float  # How often it ran per iteration, median.
    median_ms: float  # Time per iteration in which at least one ran, median.
    share: float | None  # Its part of the phase's time.
    bytes: float | None  # Bytes that it states to move per iteration.
    h2d: ConcurrentTransfers  # Copies to the device during it.
    d2h: ConcurrentTransfers  # Copies to the host during it.
    # Of a sub-step on the host: the direction whose pageable copies cover it.
    waits_for: str | None
    peak_bytes: int | None  # Peak of the trace's `peak_pool`, median over iterations.
    busy_bytes_per_s: float | None  # Rate of the faster direction while copies run.


@dataclass(frozen=True)
class ResourceUse:
    """Time in which a resource worked in a phase."""

    rank: int
    phase: str  # The phase, or `other`.
    resource: str
    median_ms: float  # Median per iteration.
    share: float | None  # Its part of the phase's time.


class SubstepAggregator:
    """Aggregates the ops of one rank."""

    def __init__(
        self, trace: Trace, rank: int, pool: str | None, phases: pd.DataFrame
    ) -> None:
        """Prepare link and memory of the rank; `phases` are from `split_by_phase`."""
        self._rank = rank
        self._timeline = memory_timeline(trace, rank, pool) if pool else None
        self._memory_spans = memory_spans(trace, rank, pool) if pool else None
        self._peak = link_peak(trace, rank)
        self._phase_ms = phases.groupby("phase")["ms"].sum()
        self._iterations = sorted(phases["iteration"].unique())
        self._traffic = {
            direction: traffic(trace, rank, direction) for direction in DIRECTIONS
        }
        self._busy_by_host_memory: dict[tuple[str, str], Any] = {}
        if trace.rank(rank).transfers_recorded:
            for direction in DIRECTIONS:
                rows = copies(trace, rank, direction)
                for kind in _HOST_MEMORY:
                    own = rows.only(rows.host_memory == kind)
                    self._busy_by_host_memory[direction, kind] = busy_between(
                        own, trace.rank(rank).transfers_spans_ns
                    )

    def steps(self, rows: pd.DataFrame, keys: list[str], tiles: bool) -> list[SubStep]:
        """Return a SubStep per combination of the keys, in the order of their starts.

        The rows are from `split_by_phase`.
        """
        rows = remove_overlaps(rows, [*keys, "iteration"])
        starts, ends = (
            rows["start_ns"].to_numpy(np.int64),
            rows["end_ns"].to_numpy(np.int64),
        )
        figures = self._figures(rows, starts, ends)
        table = rows[[*keys, "iteration"]].assign(**figures, start=starts)
        groups = table.groupby([*keys, "iteration"], sort=False)
        # A sum exists only where each of its parts was recorded.
        sums = groups[
            [name for name in figures if name not in ("peak", "resolution")]
        ].sum(min_count=1)
        recorded = groups[list(sums.columns)].count().eq(groups.size(), axis=0)
        per_iteration = sums.where(recorded).join(groups[["peak"]].max())
        by_key = per_iteration.groupby(level=keys, sort=False)
        medians, totals = by_key.median(), by_key.sum(min_count=1)
        complete = by_key.count().eq(by_key.size(), axis=0)
        # A sub-step that an iteration lacks took no time there.
        for column in ("ms", "count"):
            filled = (
                per_iteration[column]
                .unstack("iteration")
                .reindex(columns=self._iterations)
                .fillna(0.0)
            )
            medians[column] = filled.median(axis=1)
        typical = table.groupby(keys, sort=False)["resolution"].median()
        # What most iterations lack is the tail of something else: of a plan that
        # changed, or at the edge of a phase.
        shown = [key for key in medians.index if tiles or medians.loc[key]["count"] > 0]
        return [
            self._step(
                dict(zip(keys, key, strict=True)),
                medians.loc[key],
                totals.loc[key].where(complete.loc[key]),
                typical[key],
            )
            for key in sorted(shown, key=_order(table, keys))
        ]

    def _figures(self, rows: pd.DataFrame, starts: Ints, ends: Ints) -> dict[str, Any]:
        """Return the figures of each row, by the column that holds them."""
        figures = {
            "ms": (ends - starts) / 1e6,
            "count": rows["first"].astype(np.float64),
        }
        sizes = rows["bytes"].astype("Float64").to_numpy(np.float64, na_value=np.nan)
        figures["bytes"] = np.where(rows["first"], sizes, 0.0)
        figures["peak"] = np.nan
        if self._timeline is not None:
            recorded = within_spans(self._memory_spans, starts, ends)
            figures["peak"] = np.where(
                recorded, peak_between(*self._timeline, starts, ends), np.nan
            )
        figures["resolution"] = (ends - starts).astype(np.float64)
        for direction in DIRECTIONS:
            figures |= self._moved(direction, starts, ends)
        return figures

    def _moved(self, direction: str, starts: Ints, ends: Ints) -> dict[str, Any]:
        """Return the bytes that moved in each interval, and the ms in which copies ran,
        in all and by kind of host memory."""
        moved = self._traffic[direction]
        figures: dict[str, Any] = {
            f"{direction} bytes": np.nan if moved is None else moved.bytes(starts, ends)
        }
        totals = {"busy": moved.busy if moved is not None else None}
        totals |= {
            kind: self._busy_by_host_memory.get((direction, kind))
            for kind in _HOST_MEMORY
        }
        for kind, total in totals.items():
            figures[f"{direction} {kind}"] = (
                np.nan if total is None else total(starts, ends) / 1e6
            )
        return figures

    def _step(
        self,
        key: dict[str, Any],
        median: pd.Series[float],
        total: pd.Series[float],
        typical: float,
    ) -> SubStep:
        transfers = {
            direction: self._transfers(direction, median, total, typical)
            for direction in DIRECTIONS
        }
        pageable = {
            direction: side.pageable_share or 0.0
            for direction, side in transfers.items()
        }
        longest = max(DIRECTIONS, key=lambda direction: pageable[direction])
        rates = [
            side.busy_bytes_per_s
            for side in transfers.values()
            if side.busy_bytes_per_s
        ]
        waits = key["resource"] in ON_HOST and pageable[longest] >= _COVERED
        return SubStep(
            rank=self._rank,
            phase=key["phase"],
            name=key["name"],
            resource=key["resource"],
            within=key["within"] or None,
            subgroup=int(key["subgroup"]) if "subgroup" in key else None,
            count=float(median["count"]),
            median_ms=float(median["ms"]),
            share=self._share(key["phase"], total["ms"]),
            bytes=_none_if_nan(median["bytes"]),
            **transfers,
            waits_for=longest if waits else None,
            peak_bytes=None if np.isnan(median["peak"]) else round(median["peak"]),
            busy_bytes_per_s=max(rates, default=None),
        )

    def _transfers(
        self,
        direction: str,
        median: pd.Series[float],
        total: pd.Series[float],
        typical: float,
    ) -> ConcurrentTransfers:
        moved, ms = self._traffic[direction], total["ms"]
        resolved = moved is not None and typical >= moved.resolution_ns
        busy = total[f"{direction} busy"]
        kinds = ("busy", *_HOST_MEMORY)
        shares = {
            kind: _none_if_nan(total[f"{direction} {kind}"] / ms) if ms else None
            for kind in kinds
        }
        rate = (
            _none_if_nan(total[f"{direction} bytes"] / busy * 1e3) if busy > 0 else None
        )
        return ConcurrentTransfers(
            bytes=_none_if_nan(median[f"{direction} bytes"]) if resolved else None,
            busy_share=shares["busy"],
            pinned_share=shares["pinned"],
            pageable_share=shares["pageable"],
            busy_bytes_per_s=rate,
            share_of_peak=rate / self._peak
            if rate is not None and self._peak
            else None,
        )

    def _share(self, phase: str, ms: float) -> float | None:
        phase_ms = self._phase_ms.get(phase, 0.0)
        return float(ms / phase_ms) if phase_ms else None

    def resources(self, rows: pd.DataFrame) -> list[ResourceUse]:
        """Return the time in which each resource worked. Time of an op that is nested
        in another counts once."""
        rows = remove_overlaps(rows, ["phase", "resource", "iteration"])
        ms = (rows["end_ns"] - rows["start_ns"]) / 1e6
        sums = (
            ms.groupby([rows["phase"], rows["resource"], rows["iteration"]])
            .sum()
            .unstack(fill_value=0.0)
        )
        medians, totals = (
            sums.reindex(columns=self._iterations, fill_value=0.0).median(axis=1),
            sums.sum(axis=1),
        )
        return [
            ResourceUse(
                self._rank,
                phase,
                resource,
                float(medians[phase, resource]),
                self._share(phase, totals[phase, resource]),
            )
            for phase, resource in sorted(
                sums.index,
                key=lambda key: (ITERATION_PARTS.index(key[0]), -totals[key]),
            )
        ]


def _order(table: pd.DataFrame, keys: list[str]) -> Any:
    """Return the sort key of sub-steps: phase, subgroup, start.

    The remainder `rest` comes last in its phase.
    """
    begins = table.assign(
        start=table["start"] - table.groupby("iteration")["start"].transform("min")
    )
    starts = begins.groupby(keys, sort=False)["start"].median()
    name, subgroup = (
        keys.index("name"),
        keys.index("subgroup") if "subgroup" in keys else None,
    )

    def order(key: Any) -> Any:
        return (
            ITERATION_PARTS.index(key[0]),
            key[subgroup] if subgroup is not None else 0,
            key[name] == "rest",
            starts[key],
        )

    return order


def _none_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


@dataclass(frozen=True, repr=False)
class SubSteps(TabularResult, table="steps"):
    """The sub-steps of every rank.

    Attributes:
        pool: The pool of `SubStep.peak_bytes`.
        tiles: Whether the sub-steps of an update follow each other and fill it
            (DeepSpeed's own step). The operations of a schedule run at the same time:
            their times do not add up. None if no sub-steps were recorded.
        steps: Sub-steps of each phase.
        subgroups: The same figures by subgroup, of the sub-steps that have one.
        resources: Time in which each resource worked.
        storage: Bytes and waits of storage, per direction; empty where none was
            used.
    """

    pool: str | None
    tiles: bool | None
    steps: list[SubStep]
    subgroups: list[SubStep]
    resources: list[ResourceUse]
    storage: list[StorageUse]


def sub_steps(
    trace: Trace, ranks: Sequence[int] | None = None, by_subgroup: bool = True
) -> SubSteps:
    """Measure the sub-steps of some ranks, or of all if None.

    There are none where the steady iterations have no sub-steps.
    """
    numbers = steady_iterations(trace).numbers
    pool = peak_pool(trace)
    tiles, steps, subgroups, resources = True, [], [], []
    for rank in trace.ranks if ranks is None else ranks:
        if not len(trace.columns(rank, "ops")):
            continue
        rows, phases = split_by_phase(trace, rank, numbers)
        if rows.empty:
            continue
        in_sequence = run_in_sequence(rows)
        tiles &= in_sequence
        aggregator = SubstepAggregator(trace, rank, pool, phases)
        steps += aggregator.steps(
            rows, ["phase", "name", "resource", "within"], in_sequence
        )
        resources += aggregator.resources(rows)
        if by_subgroup:
            keys = ["phase", "subgroup", "name", "resource", "within"]
            subgroups += aggregator.steps(
                rows[rows["subgroup"] >= 0], keys, in_sequence
            )
    return SubSteps(
        pool,
        tiles if steps else None,
        steps,
        subgroups,
        resources,
        storage_use(trace, ranks),
    )
