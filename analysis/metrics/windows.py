"""When device memory is free, how much, and whether the link is idle then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import to_frame
from ebbtide.analysis.metrics.devices import capacity_bytes, link_peak, main_device, main_pool, memory_line
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, Traffic, traffic
from ebbtide.analysis.metrics.recurring_windows import Place, by_place
from ebbtide.analysis.timeseries.step_functions import Floats, Ints
from ebbtide.analysis.timeseries.thresholds import FreeLine, runs
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

# Bytes of optimizer state per parameter: fp32 master, first and second moment of Adam.
STATE_BYTES = 12


@dataclass(frozen=True)
class Window:
    """An interval in which at least `Windows.min_bytes` of a device are free.

    start_ms, end_ms: from the start of its iteration, or of the trace where it has no phases; iteration and phase are
    None then. A guaranteed window has no iteration: it is free in all of them. free_bytes: the least over the window.
    Idle shares: of the window's time; None where neither copies nor counters tell. resident_params: how many
    parameters' state (12 B: fp32 master and two moments) fits into free_bytes. streamed_params: how many parameters'
    state could come in, be updated and go out again in the window, through a few buffers, if the idle part of both
    directions ran at the link's peak: an upper bound; None where peak or idleness is not known.
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
    resident_params: int
    streamed_params: int | None


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

    def to_pandas(self) -> pd.DataFrame:
        """A row per window, with the fields of `Window` as columns."""
        return to_frame(self.windows, Window)


def find_windows(trace: Trace, min_bytes: int, ranks: Sequence[int] | None = None) -> Windows:
    """The windows of a trace in which at least `min_bytes` are free, cut where a phase begins or ends; of all ranks or
    some.

    Free is the device's capacity less the pool that says most about it (`main_pool`). Where the memory line has no
    value yet there is no window. Raises TraceError where the trace has no memory line or no capacity.
    """
    pool = main_pool(trace)
    if pool is None:
        raise TraceError(f"{trace.path} has no memory line of a device: record it with `ebbtide profile`")
    devices: list[dict[str, Any]] = []
    windows: list[Window] = []
    guaranteed: list[Window] = []
    for rank in trace.ranks if ranks is None else ranks:
        times, used = memory_line(trace, rank, pool)
        capacity = capacity_bytes(trace, rank)
        devices.append({"rank": rank, "device": main_device(trace, rank), "capacity_bytes": capacity})
        if not len(times):
            continue
        if capacity is None:
            raise TraceError(
                f"{trace.path} does not tell the capacity of rank {rank}'s device: nothing can be called free "
                "(ebbtide import takes --capacity)"
            )
        finder = _Finder(trace, rank, FreeLine(times, capacity - used), min_bytes)
        windows += finder.windows()
        guaranteed += finder.guaranteed()
    return Windows(min_bytes, devices[0]["capacity_bytes"] if devices else None, devices, windows, guaranteed)


@dataclass(frozen=True)
class _Found:
    """A window before its shares are known. origin_ns: where its times count from."""

    iteration: int | None
    phase: str | None
    origin_ns: int
    start_ns: int
    end_ns: int
    free: int


class _Finder:
    """Finds the windows of one rank."""

    def __init__(self, trace: Trace, rank: int, line: FreeLine, min_bytes: int) -> None:
        self._trace = trace
        self._rank = rank
        self._line = line
        self._min_bytes = min_bytes
        self._peak = link_peak(trace, rank)
        self._traffic = {way: traffic(trace, rank, way) for way in DIRECTIONS}
        self._pieces = pieces(trace, rank, line)

    def windows(self) -> list[Window]:
        found = list(self._found())
        starts = np.array([f.start_ns for f in found], np.int64)
        ends = np.array([f.end_ns for f in found], np.int64)
        idle = [_idle(self._traffic[way], starts, ends, self._peak) for way in DIRECTIONS]
        return [
            self._window(f.iteration, f.phase, f.start_ns - f.origin_ns, f.end_ns - f.origin_ns, f.free, h2d, d2h)
            for f, h2d, d2h in zip(found, *idle, strict=True)
        ]

    def _found(self) -> Iterator[_Found]:
        columns = ["iteration", "phase", "origin_ns", "start_ns", "end_ns"]
        for iteration, phase, origin, start, end in self._pieces[columns].itertuples(index=False, name=None):
            for begins, ends, free in runs(*self._line.between(start, end), end, self._min_bytes):
                yield _Found(iteration, phase, origin, int(begins), int(ends), free)

    def guaranteed(self) -> list[Window]:
        """What is free in every iteration at the same place. The times are those of an iteration whose phases follow
        each other in their usual order, each as long as its median; of all iterations the least free, and the least
        idle, counts at each point of a phase. A phase that some iteration lacks guarantees nothing."""
        found = []
        for place in by_place(self._pieces):
            for begins, ends, free in place.windows(self._line, self._min_bytes):
                idle = [self._least_idle(self._traffic[way], place, begins, ends) for way in DIRECTIONS]
                start, end = place.start_ns + place.length_ns * begins, place.start_ns + place.length_ns * ends
                found.append(self._window(None, place.phase, start, end, free, *idle))
        return found

    def _least_idle(self, moved: Traffic | None, place: Place, begins: float, ends: float) -> float | None:
        lengths = place.ends - place.starts
        start = place.starts + np.rint(lengths * begins).astype(np.int64)
        end = np.maximum(place.starts + np.rint(lengths * ends).astype(np.int64), start + 1)
        shares = _idle(moved, start, end, self._peak)
        return None if None in shares else min(share for share in shares if share is not None)

    def _window(
        self,
        iteration: int | None,
        phase: str | None,
        start: float,
        end: float,
        free: int,
        h2d: float | None,
        d2h: float | None,
    ) -> Window:
        streamed = None
        if h2d is not None and d2h is not None and self._peak:
            streamed = int((end - start) / 1e9 * self._peak * min(h2d, d2h) / STATE_BYTES)
        return Window(
            rank=self._rank,
            device=main_device(self._trace, self._rank),
            iteration=iteration,
            phase=phase,
            start_ms=start / 1e6,
            end_ms=end / 1e6,
            free_bytes=free,
            h2d_idle_share=h2d,
            d2h_idle_share=d2h,
            resident_params=free // STATE_BYTES,
            streamed_params=streamed,
        )


def _idle(moved: Traffic | None, starts: Ints, ends: Ints, peak: float | None) -> list[float | None]:
    if moved is None:
        return [None] * len(starts)
    shares: Floats = moved.idle_share(starts, ends, peak)
    return [None if np.isnan(share) else float(share) for share in shares]


def pieces(trace: Trace, rank: int, line: FreeLine) -> pd.DataFrame:
    """iteration, phase, place, origin_ns, start_ns, end_ns: the phases of each iteration in order, `other` included,
    or the whole trace as one where it has none. place: which one of its phase it is within the iteration; of `other`,
    how many phases came before it."""
    cut = intervals(trace, rank, device_times=False)
    if cut.spans.empty:
        start, end = int(line.times[0]), int(line.times[-1])
        whole = {"iteration": None, "phase": None, "place": 0, "origin_ns": start, "start_ns": start, "end_ns": end}
        return pd.DataFrame([whole], dtype=object)
    found = cut.with_other.sort_values("start_ns", kind="stable")
    # The rest of an iteration is told apart by how many phases came before it: the first one has none at its start.
    phases_before = (found["phase"] != "other").groupby(found["iteration"]).cumsum()
    nth = found.groupby(["iteration", "phase"]).cumcount()
    found["place"] = phases_before.where(found["phase"] == "other", nth)
    origins = cut.spans[["iteration", "start_ns"]].rename(columns={"start_ns": "origin_ns"})
    return found.merge(origins, on="iteration")
