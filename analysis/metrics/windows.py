"""Finds windows of free memory, and how idle the link is then.

Memory is the device's, or the host's for a job without a GPU.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.dataframes import TabularResult
from ebbtide.analysis.metrics.cache import recent_per_trace
from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    link_peak,
    main_device,
    memory_timeline,
    ran_on_cpu,
)
from ebbtide.analysis.metrics.iterations import intervals, steady_iterations
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS, traffic
from ebbtide.analysis.metrics.memory_spans import memory_spans, within_spans
from ebbtide.analysis.metrics.missing import NO_MEMORY, no_capacity, on_demand_remarks
from ebbtide.analysis.timeseries.step_functions import (
    Floats,
    FreeTimeline,
    Ints,
    intervals_at_least,
    merge_times,
)
from ebbtide.phases import OTHER
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import STATE_BYTES

# Free bytes where a timeline has no value yet: no memory is guaranteed there.
_NOT_RECORDED = np.iinfo(np.int64).min
# A step function on [0, 1): (where each value begins, values).
Envelope = tuple[Floats, Ints]


@dataclass(frozen=True)
class PhaseSegment:
    """A part of one phase that every iteration has."""

    phase: str  # The phase, or `other`.
    starts: Ints  # Its start in each iteration, ns.
    ends: Ints  # Its end in each iteration, ns.
    start_ns: float  # Its start in the typical iteration, from that iteration's start.
    length_ns: float  # Its length in the typical iteration.

    def windows(
        self, timeline: FreeTimeline, min_bytes: int
    ) -> Iterator[tuple[float, float, int]]:
        """Yield (start, end, least free bytes) of parts with `min_bytes` always free.

        Start and end are 0 to 1 of the segment.
        """
        yield from intervals_at_least(*self.least_free(timeline), 1.0, min_bytes)

    def least_free(self, timeline: FreeTimeline) -> Envelope:
        """Return the least free bytes over all iterations as (starts, 0 to 1 of the
        segment; values)."""
        envelopes = [
            _relative(timeline, int(s), int(e))
            for s, e in zip(self.starts, self.ends, strict=True)
        ]
        return _lower_envelope(envelopes)


def recurring_segments(
    phases: pd.DataFrame, steady: Collection[int] = ()
) -> list[PhaseSegment]:
    """Return the segments that every iteration has, one after the other, in a typical
    iteration.

    Each is as long as its median over the `steady` iterations of a table of
    `phase_table`, or over all where none of these is in the table. With medians of
    starts, neighbours would overlap."""
    phases = phases[phases["iteration"].notna()]
    every = set(phases["iteration"])
    groups = []
    lasting = phases[phases["end_ns"] > phases["start_ns"]]
    for (phase, position), group in lasting.groupby(["phase", "position"], sort=False):
        # The first iteration begins with its first phase: it alone may have no `other`
        # before it.
        lacking = every - set(group["iteration"])
        if not lacking or ((phase, position) == (OTHER, 0) and lacking == {min(every)}):
            groups.append(
                (
                    float((group["start_ns"] - group["origin_ns"]).median()),
                    str(phase),
                    group,
                )
            )
    segments = []
    reached = 0.0
    for _, phase, group in sorted(groups, key=lambda item: item[0]):
        starts, ends = (
            group["start_ns"].to_numpy(np.int64),
            group["end_ns"].to_numpy(np.int64),
        )
        counted = group["iteration"].isin(steady).to_numpy()
        length = float(np.median((ends - starts)[counted | ~counted.any()]))
        segments.append(PhaseSegment(phase, starts, ends, reached, length))
        reached += length
    return segments


def _relative(timeline: FreeTimeline, start: int, end: int) -> Envelope:
    """Return the timeline within [start, end), with times scaled to 0 to 1."""
    times, free = timeline.between(start, end)
    positions = (times - start) / (end - start)
    if not len(positions) or positions[0] > 0:
        positions, free = np.append(0.0, positions), np.append(_NOT_RECORDED, free)
    return positions, free


def _lower_envelope(envelopes: list[Envelope]) -> Envelope:
    """Return the smallest of several step functions on [0, 1), at each point."""
    while len(envelopes) > 1:
        paired = [
            _lower(*pair) for pair in zip(envelopes[::2], envelopes[1::2], strict=False)
        ]
        envelopes = paired + envelopes[len(paired) * 2 :]
    return envelopes[0]


def _lower(a: Envelope, b: Envelope) -> Envelope:
    positions = merge_times(a[0], b[0])
    values = np.minimum(
        *(
            free[np.searchsorted(edges, positions, side="right") - 1]
            for edges, free in (a, b)
        )
    )
    changes = np.append(True, np.diff(values) != 0)
    return positions[changes], values[changes]


@recent_per_trace
def phase_table(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the phases in which free memory is known, with `other`.

    Columns: iteration, phase, position, origin_ns (the iteration's start), start_ns,
    end_ns. position: which one of its phase it is within the iteration, from 0; of
    `other` the number of phases before it. A trace without phases has one row, of its
    samples, without iteration and phase.
    """
    times = intervals(trace, rank, device_times=False)
    if times.spans.empty:
        samples = memory_timeline(trace, rank, free_pool(trace) or "")[0]
        start, end = int(samples[0]), int(samples[-1])
        row = {
            "iteration": None,
            "phase": None,
            "position": 0,
            "origin_ns": start,
            "start_ns": start,
            "end_ns": end,
        }
        return pd.DataFrame([row], dtype=object)
    phases = times.with_other.sort_values("start_ns", kind="stable")
    # `other` is numbered by the phases before it: the first iteration may have none at
    # its start.
    phases_before = (phases["phase"] != OTHER).groupby(phases["iteration"]).cumsum()
    nth = phases.groupby(["iteration", "phase"]).cumcount()
    phases["position"] = phases_before.where(phases["phase"] == OTHER, nth)
    origins = times.spans[["iteration", "start_ns"]].rename(
        columns={"start_ns": "origin_ns"}
    )
    bounds = (phases[column].to_numpy(np.int64) for column in ("start_ns", "end_ns"))
    phases = phases[
        within_spans(memory_spans(trace, rank, free_pool(trace) or ""), *bounds)
    ]
    return phases.merge(origins, on="iteration")


@dataclass(frozen=True)
class Window:
    """An interval in which at least `Windows.min_bytes` are free.

    Attributes:
        rank: The rank.
        device: The rank's first device.
        iteration: The iteration; None for a recurring window, which is free in all
            iterations, and in a trace without phases.
        phase: The phase, or `other`; None in a trace without phases.
        start_ms: Start, from the start of the iteration, or of the trace where it has
            no phases.
        end_ms: End, from the same origin.
        free_bytes: Least free memory in the window.
        h2d_idle_share: Share of the window in which the link moved nothing to the
            device, or, where counters were recorded and not copies, share of its peak
            rate that was not used; None if neither is known.
        d2h_idle_share: The same from the device to the host.
        resident_params: Number of parameters whose optimizer state (12 B each: fp32
            master and two moments) fits into `free_bytes`. None in a job without a GPU:
            its state is in that memory already.
        streamed_params: Number of parameters whose state could be fetched, updated and
            flushed in the window through a few buffers, if the idle share of both
            directions ran at the link's peak: an upper bound. None if the peak or the
            idle shares are not known.
        length_ms: Time from start to end.
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
    resident_params: int | None
    streamed_params: int | None
    length_ms: float


@dataclass(frozen=True, repr=False)
class Windows(TabularResult, table="windows"):
    """All windows of a trace for one threshold.

    Attributes:
        min_bytes: Least free memory of a window.
        capacity_bytes: Memory of the first device.
        pool: The pool that free memory is computed from: capacity minus this pool. None
            if no memory was recorded.
        memory: Whose memory it is: `device`, or `host` of a job without a GPU.
        devices: A dict per rank with `rank`, `device`, `capacity_bytes` and
            `iteration_ms`: the length of the iteration that the times of its recurring
            windows refer to; None where none is known.
        windows: Windows of each iteration.
        guaranteed: Recurring windows.
        unrecorded_ranks: Ranks without a sample of `pool`, whose windows cannot be
            known.
        remarks: Lines on the iterations with known windows, where these are not all.
    """

    min_bytes: int
    capacity_bytes: int | None
    pool: str | None
    memory: str
    devices: list[dict[str, Any]]
    windows: list[Window]
    guaranteed: list[Window]
    unrecorded_ranks: list[int]
    remarks: list[str] = field(default_factory=list)

    @property
    def known_ranks(self) -> list[int]:
        """Ranks whose windows are known: memory and its capacity were recorded."""
        with_capacity = [
            device["rank"]
            for device in self.devices
            if device["capacity_bytes"] is not None
        ]
        return [rank for rank in with_capacity if rank not in self.unrecorded_ranks]

    @property
    def missing(self) -> list[str]:
        """Lines on the ranks whose windows are not known: what was not recorded, and
        how to record it."""
        if self.pool is None:
            return [NO_MEMORY]
        unrecorded = [
            f"rank {rank}: {self.pool} memory was not recorded, so its windows are not "
            "known"
            for rank in self.unrecorded_ranks
        ]
        without_capacity = {device["rank"] for device in self.devices} - {
            *self.known_ranks,
            *self.unrecorded_ranks,
        }
        return unrecorded + [no_capacity(rank) for rank in sorted(without_capacity)]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide windows --json` prints."""
        return {**asdict(self), "missing": self.missing}


def find_windows(
    trace: Trace, min_bytes: int, ranks: Sequence[int] | None = None
) -> Windows:
    """Find the windows in which at least `min_bytes` are free on some ranks, or on all
    if None.

    Windows are cut where a phase begins or ends, and begin with the first sample. Ranks
    whose memory or capacity is not known have none (see `Windows.missing`)."""
    pool = free_pool(trace)
    devices: list[dict[str, Any]] = []
    windows: list[Window] = []
    guaranteed: list[Window] = []
    unrecorded: list[int] = []
    for rank in trace.ranks if ranks is None else ranks:
        times, used = memory_timeline(trace, rank, pool or "")
        capacity = capacity_bytes(trace, rank)
        device: dict[str, Any] = {
            "rank": rank,
            "device": main_device(trace, rank),
            "capacity_bytes": capacity,
            "iteration_ms": None,
        }
        devices.append(device)
        if not len(times):
            unrecorded.append(rank)
        elif capacity is not None:
            finder = _WindowFinder(
                trace, rank, FreeTimeline(times, capacity - used), min_bytes
            )
            windows += finder.windows()
            guaranteed += finder.guaranteed()
            device["iteration_ms"] = finder.iteration_ms
    capacity = devices[0]["capacity_bytes"] if devices else None
    memory = "host" if ran_on_cpu(trace) else "device"
    remarks = on_demand_remarks(trace)
    return Windows(
        min_bytes,
        capacity,
        pool,
        memory,
        devices,
        windows,
        guaranteed,
        unrecorded,
        remarks,
    )


class _WindowFinder:
    """Finds the windows of one rank."""

    def __init__(
        self, trace: Trace, rank: int, timeline: FreeTimeline, min_bytes: int
    ) -> None:
        self._trace = trace
        self._rank = rank
        self._timeline = timeline
        self._min_bytes = min_bytes
        self._peak = link_peak(trace, rank)
        self._on_cpu = ran_on_cpu(trace)
        self._traffic = {
            direction: traffic(trace, rank, direction) for direction in DIRECTIONS
        }
        self._phases = phase_table(trace, rank)
        self._segments = recurring_segments(
            self._phases, steady_iterations(trace).numbers
        )

    @property
    def iteration_ms(self) -> float | None:
        """The length of an iteration of recurring phases; None without iterations.

        Each phase is as long as its median.
        """
        return (
            sum(segment.length_ns for segment in self._segments) / 1e6
            if self._segments
            else None
        )

    def windows(self) -> list[Window]:
        columns = ["iteration", "phase", "origin_ns", "start_ns", "end_ns"]
        free = [
            (iteration, phase, origin, int(begin), int(until), size)
            for iteration, phase, origin, start, end in self._phases[
                columns
            ].itertuples(index=False, name=None)
            for begin, until, size in intervals_at_least(
                *self._timeline.between(start, end), end, self._min_bytes
            )
        ]
        starts, ends = (
            np.array([row[side] for row in free], np.int64) for side in (3, 4)
        )
        idle = (self._idle(direction, starts, ends) for direction in DIRECTIONS)
        return [
            self._window(iteration, phase, start - origin, end - origin, size, *shares)
            for (iteration, phase, origin, start, end, size), *shares in zip(
                free, *idle, strict=True
            )
        ]

    def guaranteed(self) -> list[Window]:
        """Return the windows that recur at one relative position in every iteration.

        Their times are in the typical iteration (`recurring_segments`). At each point
        of a phase the iteration with the least free memory counts, and the one with the
        least idle link. A phase that some iteration lacks has no recurring window.
        """
        windows = []
        for segment in self._segments:
            lengths = segment.ends - segment.starts
            for begins, until, free in segment.windows(self._timeline, self._min_bytes):
                starts, ends = (
                    segment.starts + np.rint(lengths * edge).astype(np.int64)
                    for edge in (begins, until)
                )
                shares = [
                    self._idle(direction, starts, np.maximum(ends, starts + 1))
                    for direction in DIRECTIONS
                ]
                idle = [
                    None if None in of_direction else min(of_direction)
                    for of_direction in shares
                ]
                start, end = (
                    segment.start_ns + segment.length_ns * edge
                    for edge in (begins, until)
                )
                windows.append(
                    self._window(None, segment.phase, start, end, free, *idle)
                )
        return windows

    def _idle(self, direction: str, starts: Ints, ends: Ints) -> list[Any]:
        """Return the share of each interval, ns, in which a link direction is idle;
        None where not known."""
        moved = self._traffic[direction]
        if moved is None:
            return [None] * len(starts)
        shares = moved.idle_share(starts, ends, self._peak)
        return [None if np.isnan(share) else float(share) for share in shares]

    def _window(
        self,
        iteration: int | None,
        phase: str | None,
        start: float,
        end: float,
        free: int,
        *idle: float | None,
    ) -> Window:
        h2d, d2h = idle
        streamed = None
        if h2d is not None and d2h is not None and self._peak:
            streamed = int(
                (end - start) / 1e9 * self._peak * min(h2d, d2h) / STATE_BYTES
            )
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
            resident_params=None if self._on_cpu else free // STATE_BYTES,
            streamed_params=streamed,
            length_ms=(end - start) / 1e6,
        )
