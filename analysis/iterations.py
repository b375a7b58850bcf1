"""A trace cut into iterations and phases, and what memory and link did in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.steps import Floats, Ints, cumulative, peak_between
from ebbtide.profiler.trace import Trace

PHASES = ("forward", "backward", "update", "other")


@dataclass(frozen=True)
class Intervals:
    """Where a rank's iterations and phases lie.

    spans: iteration, start_ns, end_ns; an iteration begins where the one before ended. phases: iteration,
    micro_step, phase, start_ns, end_ns, in order and without `other`. Both on device times where every phase has
    them, else on host times.
    """

    spans: pd.DataFrame
    phases: pd.DataFrame

    def with_other(self) -> pd.DataFrame:
        """iteration, phase, start_ns, end_ns: the phases, and `other` wherever an iteration has none."""
        parts = [self.phases[["iteration", "phase", "start_ns", "end_ns"]]]
        for span in self.spans.itertuples(index=False):
            inside = self.phases[self.phases["iteration"] == span.iteration]
            reached = np.maximum.accumulate(np.append(span.start_ns, inside["end_ns"].to_numpy(np.int64)))
            begins = np.append(inside["start_ns"].to_numpy(np.int64), span.end_ns)
            gap = begins > reached
            other = {
                "iteration": span.iteration,
                "phase": "other",
                "start_ns": reached[gap],
                "end_ns": begins[gap],
            }
            parts.append(pd.DataFrame(other))
        return pd.concat(parts, ignore_index=True)


def intervals(trace: Trace, rank: int, device_times: bool = True) -> Intervals:
    """The finished iterations of a rank. device_times False: host times, by which memory lines are cut."""
    phases = trace.phases(rank)
    phases = phases[phases["iteration"].notna()]
    columns = ["iteration", "micro_step", "phase"]
    if device_times and len(phases) and phases["gpu_end_ns"].notna().all():
        times = phases[["gpu_start_ns", "gpu_end_ns"]]
    else:
        times = phases[["start_ns", "end_ns"]]
    frame = phases[columns].assign(
        iteration=phases["iteration"].astype("int64"),
        start_ns=times.iloc[:, 0].astype("int64"),
        end_ns=times.iloc[:, 1].astype("int64"),
    )
    frame = frame.sort_values("start_ns", kind="stable", ignore_index=True)
    ends = frame.groupby("iteration")["end_ns"].max()
    starts = np.roll(ends.to_numpy(np.int64), 1)
    if len(ends):
        begin = trace.rank(rank).get("first_iteration_start_ns")
        # Device clocks are placed to within microseconds: a first phase may seem to begin before its iteration.
        earliest = int(frame["start_ns"].min())
        starts[0] = earliest if begin is None else min(int(begin), earliest)
    spans = pd.DataFrame({"iteration": ends.index, "start_ns": starts, "end_ns": ends.to_numpy(np.int64)})
    return Intervals(spans.astype("int64"), frame)


def durations_ms(cut: Intervals) -> pd.DataFrame:
    """Milliseconds per iteration (index) and phase (columns of PHASES and `iteration`); NaN for a phase that no
    iteration has."""
    length = (cut.phases["end_ns"] - cut.phases["start_ns"]) / 1e6
    by_phase = length.groupby([cut.phases["iteration"], cut.phases["phase"]]).sum().unstack(fill_value=0.0)
    table = by_phase.reindex(index=cut.spans["iteration"], fill_value=0.0).reindex(columns=list(PHASES[:3]))
    table["iteration"] = ((cut.spans["end_ns"] - cut.spans["start_ns"]) / 1e6).to_numpy()
    table["other"] = (table["iteration"] - table[list(PHASES[:3])].sum(axis=1)).clip(lower=0.0)
    return table


def memory_line(trace: Trace, rank: int, pool: str) -> tuple[Ints, Ints]:
    """(times ns, bytes) of one pool: on the rank's first device, or on the host for a pool of the host's."""
    rows = trace.memory(rank)
    rows = rows[rows["pool"] == pool]
    device = main_device(trace, rank)
    if (rows["device"] == device).any():
        rows = rows[rows["device"] == device]
    return rows["t_ns"].to_numpy(np.int64), rows["bytes"].to_numpy(np.int64)


def main_device(trace: Trace, rank: int) -> str | None:
    device: str | None = first_device(trace, rank).get("device")
    return device


def capacity_bytes(trace: Trace, rank: int) -> int | None:
    """The memory of the rank's first device: the card's, or the host's where the job runs on the CPU."""
    capacity: int | None = first_device(trace, rank).get("capacity_bytes")
    return capacity


def link_peak(trace: Trace, rank: int) -> float | None:
    """The most that the link of the rank's first device carries in one direction, bytes/s; None where not known."""
    peak: float | None = (first_device(trace, rank).get("link") or {}).get("peak_bytes_per_s")
    return peak


def first_device(trace: Trace, rank: int) -> dict[str, Any]:
    """The meta of the device that a rank's figures are about; empty where the trace names none."""
    devices: list[dict[str, Any]] = trace.rank(rank).get("devices") or [{}]
    return devices[0]


def main_pool(trace: Trace) -> str | None:
    """The pool that says most about the device: `device` where recorded, else `allocated`, else `heap`."""
    recorded = {pool for rank in trace.ranks for pool in trace.memory(rank)["pool"].unique()}
    return next((pool for pool in ("device", "allocated", "heap") if pool in recorded), None)


def phase_peaks(trace: Trace, rank: int, pool: str) -> pd.DataFrame:
    """The peak of a pool per iteration (index) and phase (columns), bytes; NaN where nothing was recorded."""
    pieces = intervals(trace, rank, device_times=False).with_other()
    starts, ends = pieces["start_ns"].to_numpy(np.int64), pieces["end_ns"].to_numpy(np.int64)
    pieces["peak"] = peak_between(*memory_line(trace, rank, pool), starts, ends)
    return pieces.groupby(["iteration", "phase"])["peak"].max().unstack().reindex(columns=list(PHASES))


def phase_bytes(trace: Trace, rank: int, direction: str) -> pd.DataFrame | None:
    """Bytes moved per iteration (index) and phase (columns); NaN for iterations that no sample of the counters covers,
    None where neither copies nor counters were recorded."""
    total = moved(trace, rank, direction)
    if total is None:
        return None
    pieces = intervals(trace, rank).with_other()
    starts, ends = pieces["start_ns"].to_numpy(np.int64), pieces["end_ns"].to_numpy(np.int64)
    pieces["bytes"] = total(ends) - total(starts)
    table = pieces.groupby(["iteration", "phase"])["bytes"].sum().unstack(fill_value=0.0)
    table = table.reindex(columns=list(PHASES), fill_value=0.0)
    if not trace.rank(rank).get("transfers_recorded"):
        first, last = link_reach(trace, rank)
        spans = pieces.groupby("iteration").agg(start=("start_ns", "min"), end=("end_ns", "max"))
        table[(spans["end"] <= first) | (spans["start"] >= last)] = np.nan
    return table


def link_reach(trace: Trace, rank: int) -> tuple[int, int]:
    """(start ns, end ns) of the time that the counters' samples of a rank's link cover; there must be some."""
    rows = trace.link(rank)
    return int((rows["t_ns"] - rows["window_ns"]).min()), int(rows["t_ns"].max())


def moved(trace: Trace, rank: int, direction: str) -> Callable[[Ints], Floats] | None:
    """Bytes moved by a time (ns), from the copies where recorded, else from the link's counters; None: neither."""
    if trace.rank(rank).get("transfers_recorded"):
        rows = trace.transfers(rank)
        rows = rows[rows["direction"] == direction]
        if len(rows) and rows["bytes"].isna().all():
            return None
        rows = rows[rows["bytes"].notna()]
        starts, ends = rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64)
        return cumulative(starts, ends, rows["bytes"].to_numpy(np.float64))
    rows = trace.link(rank)
    rows = rows[(rows["device"] == main_device(trace, rank)) & rows[f"{direction}_bytes_per_s"].notna()]
    if rows.empty:
        return None
    ends = rows["t_ns"].to_numpy(np.int64)
    # A sample stands for the time since the one before, of which its window may be but a part.
    starts = np.append(ends[0] - rows["window_ns"].iloc[0], ends[:-1])
    rates = rows[f"{direction}_bytes_per_s"].to_numpy(np.float64)
    return cumulative(starts, ends, rates * (ends - starts) / 1e9)
