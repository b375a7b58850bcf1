"""The figures of a rank's sub-steps: time, bytes, the copies that ran meanwhile, memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import link_peak, memory_line
from ebbtide.analysis.metrics.iterations import PHASES
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, copies, covering, traffic
from ebbtide.analysis.metrics.substeps.operations import ON_HOST, apart
from ebbtide.analysis.timeseries.step_functions import Ints, peak_between, union
from ebbtide.profiler.trace import Trace

# A sub-step of the host that a pageable copy covers for so much of its time waits for that copy.
_COVERED = 0.5
_KINDS = ("pinned", "pageable")


@dataclass(frozen=True)
class Beside:
    """What the link did in one direction during a sub-step.

    bytes: moved, per iteration. busy_share, pinned_share, pageable_share: of the sub-step's time, in which any copy
    ran, and such a one. busy_bytes_per_s: while copies ran; share_of_peak: of that. None for what was not recorded;
    counters tell bytes alone, and of no sub-step that is shorter than they lie apart.
    """

    bytes: float | None
    busy_share: float | None
    pinned_share: float | None
    pageable_share: float | None
    busy_bytes_per_s: float | None
    share_of_peak: float | None


@dataclass(frozen=True)
class SubStep:
    """One sub-step (or kind of operation) in a phase of a rank, over the counted iterations that have any.

    within: the sub-step that it is a part of, None where it stands by itself. subgroup: None for all of them together.
    count, median_ms: per iteration, medians; the time is that in which at least one ran. share: of the phase's time.
    bytes: that it says it moves, per iteration. waits_for: the direction whose pageable copies cover it, of one on the
    host. peak_bytes: of the trace's main pool, median over iterations.
    """

    rank: int
    phase: str
    name: str
    resource: str
    within: str | None
    subgroup: int | None
    count: float
    median_ms: float
    share: float | None
    bytes: float | None
    h2d: Beside
    d2h: Beside
    waits_for: str | None
    peak_bytes: int | None


@dataclass(frozen=True)
class ResourceUse:
    """Time in which a resource worked in a phase: median per iteration, and its share of the phase's time."""

    rank: int
    phase: str
    resource: str
    median_ms: float
    share: float | None


class Measured:
    """Works out the figures of one rank, from its ops and phases as `op_pieces` gives them; pool: whose peaks."""

    def __init__(self, trace: Trace, rank: int, pool: str | None, phases: pd.DataFrame) -> None:
        self._rank = rank
        self._line = memory_line(trace, rank, pool) if pool else None
        self._peak = link_peak(trace, rank)
        self._phase_ms = phases.groupby("phase")["ms"].sum()
        self._iterations = sorted(phases["iteration"].unique())
        self._moved = {way: traffic(trace, rank, way) for way in DIRECTIONS}
        self._kinds: dict[tuple[str, str], Any] = {}
        if trace.rank(rank).get("transfers_recorded"):
            for way in DIRECTIONS:
                rows = copies(trace, rank, way)
                for kind in _KINDS:
                    of = rows[rows["host_memory"] == kind]
                    spans = union(of["start_ns"].to_numpy(np.int64), of["end_ns"].to_numpy(np.int64))
                    self._kinds[way, kind] = covering(*spans)

    def steps(self, rows: pd.DataFrame, keys: list[str], tiles: bool) -> list[SubStep]:
        """A SubStep for each combination of the keys, those of a phase as they begin. tiles: they add
        up to their phase, and none may lack."""
        rows = apart(rows, [*keys, "iteration"])
        starts, ends = rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
        figures = {"ms": (ends - starts) / 1e6, "count": rows["first"].astype(np.float64)}
        figures["bytes"] = rows["bytes"].astype("Float64").to_numpy(np.float64, na_value=np.nan)
        figures["bytes"] = np.where(rows["first"], figures["bytes"], 0.0)
        figures["peak"] = peak_between(*self._line, starts, ends) if self._line is not None else np.nan
        figures["resolution"] = (ends - starts).astype(np.float64)
        for way in DIRECTIONS:
            figures |= self._beside(way, starts, ends)
        table = rows[[*keys, "iteration"]].assign(**figures, start=starts)
        groups = table.groupby([*keys, "iteration"], sort=False)
        # A sum is known where each of its parts is.
        sums = groups[[name for name in figures if name not in ("peak", "resolution")]].sum(min_count=1)
        known = groups[list(sums.columns)].count().eq(groups.size(), axis=0)
        per_iteration = sums.where(known).join(groups[["peak"]].max())
        whole = per_iteration.groupby(level=keys, sort=False)
        medians, totals = whole.median(), whole.sum(min_count=1)
        complete = whole.count().eq(whole.size(), axis=0)
        # Where an iteration lacks a sub-step it took no time there.
        for column in ("ms", "count"):
            filled = per_iteration[column].unstack("iteration").reindex(columns=self._iterations).fillna(0.0)
            medians[column] = filled.median(axis=1)
        typical = table.groupby(keys, sort=False)["resolution"].median()
        begins = table.assign(start=table["start"] - table.groupby("iteration")["start"].transform("min"))
        order = begins.groupby(keys, sort=False)["start"].median()
        found = []
        name = keys.index("name")
        # The rest is what lies between the others.
        by_subgroup = "subgroup" in keys

        def place(key: Any) -> Any:
            return (
                PHASES.index(key[0]),
                key[keys.index("subgroup")] if by_subgroup else 0,
                key[name] == "rest",
                order[key],
            )

        # What most iterations have nothing of is the tail of something else: a plan that changed, an edge of a phase.
        for key in sorted((key for key in medians.index if tiles or medians.loc[key]["count"] > 0), key=place):
            of = dict(zip(keys, key, strict=True))
            found.append(self._step(of, medians.loc[key], totals.loc[key].where(complete.loc[key]), typical[key]))
        return found

    def _beside(self, way: str, starts: Ints, ends: Ints) -> dict[str, Any]:
        """What moved in each interval: bytes, and ms in which copies ran, by kind."""
        moved = self._moved[way]
        figures: dict[str, Any] = {f"{way} bytes": np.nan if moved is None else moved.bytes(starts, ends)}
        ran = {"busy": moved.busy if moved is not None else None}
        ran |= {kind: self._kinds.get((way, kind)) for kind in _KINDS}
        for kind, total in ran.items():
            figures[f"{way} {kind}"] = np.nan if total is None else (total(ends) - total(starts)) / 1e6
        return figures

    def _step(self, of: dict[str, Any], median: pd.Series[float], total: pd.Series[float], typical: float) -> SubStep:
        sides = {way: self._side(way, median, total, typical) for way in DIRECTIONS}
        pageable = {way: side.pageable_share or 0.0 for way, side in sides.items()}
        most = max(DIRECTIONS, key=lambda way: pageable[way])
        waits = of["resource"] in ON_HOST and pageable[most] >= _COVERED
        return SubStep(
            rank=self._rank,
            phase=of["phase"],
            name=of["name"],
            resource=of["resource"],
            within=of["within"] or None,
            subgroup=int(of["subgroup"]) if "subgroup" in of else None,
            count=float(median["count"]),
            median_ms=float(median["ms"]),
            share=self._share(of["phase"], total["ms"]),
            bytes=_known(median["bytes"]),
            **sides,
            waits_for=most if waits else None,
            peak_bytes=None if np.isnan(median["peak"]) else round(median["peak"]),
        )

    def _side(self, way: str, median: pd.Series[float], total: pd.Series[float], typical: float) -> Beside:
        moved, ms = self._moved[way], total["ms"]
        told = moved is not None and typical >= moved.resolution_ns
        busy = total[f"{way} busy"]
        shares = {kind: _known(total[f"{way} {kind}"] / ms) if ms else None for kind in ("busy", *_KINDS)}
        rate = _known(total[f"{way} bytes"] / busy * 1e3) if busy > 0 else None
        return Beside(
            bytes=_known(median[f"{way} bytes"]) if told else None,
            busy_share=shares["busy"],
            pinned_share=shares["pinned"],
            pageable_share=shares["pageable"],
            busy_bytes_per_s=rate,
            share_of_peak=rate / self._peak if rate is not None and self._peak else None,
        )

    def _share(self, phase: str, ms: float) -> float | None:
        whole = self._phase_ms.get(phase, 0.0)
        return float(ms / whole) if whole else None

    def resources(self, rows: pd.DataFrame) -> list[ResourceUse]:
        """What is nested in another op counts once."""
        rows = apart(rows, ["phase", "resource", "iteration"])
        ms = (rows["end_ns"] - rows["start_ns"]) / 1e6
        sums = ms.groupby([rows["phase"], rows["resource"], rows["iteration"]]).sum().unstack(fill_value=0.0)
        medians, totals = sums.reindex(columns=self._iterations, fill_value=0.0).median(axis=1), sums.sum(axis=1)
        return [
            ResourceUse(
                self._rank,
                phase,
                resource,
                float(medians[phase, resource]),
                self._share(phase, totals[phase, resource]),
            )
            for phase, resource in sorted(sums.index, key=lambda key: (PHASES.index(key[0]), -totals[key]))
        ]


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
