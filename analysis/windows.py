"""When device memory is free, how much, and whether the link is idle then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.iterations import (
    capacity_bytes,
    intervals,
    link_peak,
    link_reach,
    main_device,
    main_pool,
    memory_line,
    moved,
)
from ebbtide.analysis.steps import Ints, union
from ebbtide.profiler.trace import Trace, TraceError


@dataclass(frozen=True)
class Window:
    """An interval in which at least `Windows.min_bytes` of a device are free.

    start_ms, end_ms: from the start of its iteration, or of the trace where it has no phases; iteration and phase are
    None then. A guaranteed window has no iteration: it is free in all of them. free_bytes: the least over the window.
    Idle shares: of the window's time; None where neither copies nor counters tell.
    """

    rank: int
    device: str | None
    iteration: int | None
    phase: str | None
    start_ms: float
    end_ms: float
    free_bytes: int
    h2d_idle_share: float | None
    d2h_idle_share: float | None


@dataclass(frozen=True)
class Windows:
    """All windows of a trace for one threshold. capacity_bytes: of the first device."""

    min_bytes: int
    capacity_bytes: int | None
    devices: list[dict[str, Any]]
    windows: list[Window]
    guaranteed: list[Window]

    def as_json(self) -> dict[str, Any]:
        """The object that `ebbtide windows --json` prints."""
        return asdict(self)


def find_windows(trace: Trace, min_bytes: int) -> Windows:
    """The windows of a trace in which at least `min_bytes` are free, cut where a phase begins or ends.

    Free is the device's capacity less the pool that says most about it (`main_pool`). Where the memory line has no
    value yet there is no window. Raises TraceError where the trace has no memory line or no capacity.
    """
    pool = main_pool(trace)
    if pool is None:
        raise TraceError(f"{trace.path} has no memory line of a device: record it with `ebbtide profile`")
    devices: list[dict[str, Any]] = []
    windows: list[Window] = []
    guaranteed: list[Window] = []
    for rank in trace.ranks:
        capacity = capacity_bytes(trace, rank)
        if capacity is None:
            raise TraceError(
                f"{trace.path} does not tell the capacity of rank {rank}'s device: nothing can be called free"
            )
        devices.append({"rank": rank, "device": main_device(trace, rank), "capacity_bytes": capacity})
        line = _FreeLine(*memory_line(trace, rank, pool), capacity)
        idle = {way: _idle(trace, rank, way) for way in ("h2d", "d2h")}
        segments = _segments(trace, rank, line)
        for segment in segments:
            for start, end, free in line.windows(segment.start_ns, segment.end_ns, min_bytes):
                shares = {f"{way}_idle_share": share(start, end) for way, share in idle.items()}
                windows.append(_window(trace, rank, segment, start, end, free, **shares))
        guaranteed += _guaranteed(trace, rank, line, segments, min_bytes, idle)
    capacity = devices[0]["capacity_bytes"] if devices else None
    return Windows(min_bytes, capacity, devices, windows, guaranteed)


# The idle share of an interval (start ns, end ns).
Idle = Callable[[int, int], float | None]


@dataclass(frozen=True)
class _Segment:
    """A stretch of one phase. place: which one of its phase it is within the iteration; of `other`, how many phases
    came before it."""

    iteration: int | None
    phase: str | None
    place: int
    origin_ns: int
    start_ns: int
    end_ns: int


class _FreeLine:
    """Free bytes over time, a step function that begins with the first sample."""

    def __init__(self, times: Ints, used: Ints, capacity: int) -> None:
        self.times = times
        self.free = capacity - used

    def between(self, start: int, end: int) -> tuple[Ints, Ints]:
        """(times at which each value begins, values) within [start, end); the first time is where values begin."""
        first = max(int(np.searchsorted(self.times, start, side="right")) - 1, 0)
        after = int(np.searchsorted(self.times, end, side="left"))
        times = np.maximum(self.times[first:after], start)
        # Of samples at one time the last holds.
        last = np.append(np.diff(times) > 0, True) if len(times) else np.empty(0, bool)
        return times[last], self.free[first:after][last]

    def windows(self, start: int, end: int, min_bytes: int) -> Iterator[tuple[int, int, int]]:
        """(start ns, end ns, least free bytes) of each longest interval with enough free."""
        times, free = self.between(start, end)
        yield from runs(times, free, end, min_bytes)


def runs(times: Ints, values: Ints, end: int, least: int) -> Iterator[tuple[int, int, int]]:
    """(start, end, smallest value) of each longest interval of a step function whose values are at least `least`.

    times: where each value begins, increasing; the last one holds until `end`.
    """
    edges = np.diff(np.concatenate([[0], (values >= least).astype(np.int8), [0]]))
    bounds = np.append(times, end)
    for first, after in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        if bounds[after] > bounds[first]:
            yield int(bounds[first]), int(bounds[after]), int(values[first:after].min())


def _segments(trace: Trace, rank: int, line: _FreeLine) -> list[_Segment]:
    """The phases of each iteration, `other` included, in order; the whole trace as one where it has none."""
    cut = intervals(trace, rank, device_times=False)
    if cut.spans.empty:
        if not len(line.times):
            return []
        start, end = int(line.times[0]), int(line.times[-1])
        return [_Segment(None, None, 0, start, start, end)]
    pieces = cut.with_other().sort_values("start_ns", kind="stable")
    # The rest of an iteration is told apart by how many phases came before it: the first one has none at its start.
    phases_before = (pieces["phase"] != "other").groupby(pieces["iteration"]).cumsum()
    nth = pieces.groupby(["iteration", "phase"]).cumcount()
    pieces["place"] = phases_before.where(pieces["phase"] == "other", nth)
    pieces = pieces.merge(cut.spans[["iteration", "start_ns"]], on="iteration", suffixes=("", "_of_iteration"))
    columns = ["iteration", "phase", "place", "start_ns_of_iteration", "start_ns", "end_ns"]
    return [_Segment(*row) for row in pieces[columns].itertuples(index=False, name=None)]


def _window(trace: Trace, rank: int, segment: _Segment, start: float, end: float, free: int, **shares: Any) -> Window:
    return Window(
        rank=rank,
        device=main_device(trace, rank),
        iteration=segment.iteration,
        phase=segment.phase,
        start_ms=(start - segment.origin_ns) / 1e6,
        end_ms=(end - segment.origin_ns) / 1e6,
        free_bytes=free,
        **shares,
    )


def _idle(trace: Trace, rank: int, direction: str) -> Idle:
    """The share of an interval in which nothing moved in a direction: from the copies where recorded, else from the
    counters and the link's peak."""
    if trace.rank(rank).get("transfers_recorded"):
        rows = trace.transfers(rank)
        rows = rows[rows["direction"] == direction]
        starts, ends = union(rows["start_ns"].to_numpy(np.int64), rows["end_ns"].to_numpy(np.int64))

        def by_copies(start: int, end: int) -> float | None:
            busy = np.minimum(ends, end) - np.maximum(starts, start)
            return 1.0 - float(busy.clip(0).sum()) / (end - start)

        return by_copies
    total = moved(trace, rank, direction)
    peak = link_peak(trace, rank)
    if total is None or not peak:
        return lambda start, end: None
    first, last = link_reach(trace, rank)

    def by_counters(start: int, end: int) -> float | None:
        if start >= last or end <= first:
            return None
        before, after = total(np.array([start, end]))
        return float(np.clip(1.0 - (after - before) / (peak * (end - start) / 1e9), 0.0, 1.0))

    return by_counters


def _guaranteed(
    trace: Trace, rank: int, line: _FreeLine, segments: list[_Segment], min_bytes: int, idle: dict[str, Idle]
) -> list[Window]:
    """What is free in every iteration at the same place. The times are those of an iteration whose phases follow each
    other in their usual order, each as long as its median; of all iterations the least free, and the least idle,
    counts at each point of a phase. A phase that some iteration lacks guarantees nothing."""
    iterations = {s.iteration for s in segments if s.iteration is not None}
    by_place: dict[tuple[str | None, int], list[_Segment]] = {}
    for segment in segments:
        if segment.iteration is not None and segment.end_ns > segment.start_ns:
            by_place.setdefault((segment.phase, segment.place), []).append(segment)
    # The first iteration begins with its first phase: it alone has nothing before it.
    lacking: dict[tuple[str | None, int], int] = {("other", 0): 1}
    whole = [group for key, group in by_place.items() if len(group) >= len(iterations) - lacking.get(key, 0)]
    whole.sort(key=lambda group: float(np.median([s.start_ns - s.origin_ns for s in group])))
    found = []
    start = length = 0.0
    for group in whole:
        # One after the other, each as long as its median: medians of starts would make neighbours overlap.
        start += length
        length = float(np.median([s.end_ns - s.start_ns for s in group]))
        places, least = _least(line, group)
        bounds = np.append(places, 1.0)
        for first, after, free in runs(np.arange(len(places)), least, len(places), min_bytes):
            begins, ends = float(bounds[first]), float(bounds[after])
            shares = {f"{way}_idle_share": _least_idle(share, group, begins, ends) for way, share in idle.items()}
            typical = _Segment(None, group[0].phase, group[0].place, 0, 0, 0)
            found.append(_window(trace, rank, typical, start + length * begins, start + length * ends, free, **shares))
    return found


def _least(line: _FreeLine, group: list[_Segment]) -> tuple[Any, Any]:
    """(places from 0 to 1 where a value begins, the least free bytes of all segments from there on).

    Where a segment's line has no value yet, nothing is free."""
    columns = []
    for s in group:
        times, free = line.between(s.start_ns, s.end_ns)
        places = (times - s.start_ns) / (s.end_ns - s.start_ns)
        if not len(places) or places[0] > 0:
            places, free = np.append(0.0, places), np.append(np.iinfo(np.int64).min, free)
        columns.append(pd.Series(free, index=places))
    # One row per place where any of them changes; between changes each holds its value.
    table = pd.concat(columns, axis=1).sort_index().ffill()
    return table.index.to_numpy(), table.min(axis=1).to_numpy()


def _least_idle(share: Idle, group: list[_Segment], begins: float, ends: float) -> float | None:
    shares = []
    for s in group:
        length = s.end_ns - s.start_ns
        start, end = s.start_ns + round(length * begins), s.start_ns + round(length * ends)
        shares.append(share(start, max(end, start + 1)))
    known = [value for value in shares if value is not None]
    return min(known) if len(known) == len(shares) else None
