"""Finds free memory that recurs at the same relative position in every iteration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.cache import recent_per_trace
from ebbtide.analysis.metrics.devices import free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.memory_spans import memory_spans, within_spans
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, merge_times
from ebbtide.analysis.timeseries.thresholds import FreeTimeline, intervals_at_least
from ebbtide.phases import OTHER
from ebbtide.profiler.trace import Trace

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

    def windows(self, timeline: FreeTimeline, min_bytes: int) -> Iterator[tuple[float, float, int]]:
        """Yield (start, end, least free bytes) of the parts that have `min_bytes` free in all iterations; 0 to 1 of the
        segment."""
        yield from intervals_at_least(*self.least_free(timeline), 1.0, min_bytes)

    def least_free(self, timeline: FreeTimeline) -> Envelope:
        """Return (where each value begins, values): the least free bytes over all iterations, on 0 to 1 of the
        segment."""
        envelopes = [_relative(timeline, int(s), int(e)) for s, e in zip(self.starts, self.ends, strict=True)]
        return _lower_envelope(envelopes)


def recurring_segments(phases: pd.DataFrame) -> list[PhaseSegment]:
    """Return the segments that every iteration has, in the order of a typical iteration.

    The typical iteration puts one segment after the other, each as long as its median: with medians of starts,
    neighbours would overlap. `phases` is the table that `phase_table` returns.
    """
    phases = phases[phases["iteration"].notna()]
    every = set(phases["iteration"])
    groups = []
    lasting = phases[phases["end_ns"] > phases["start_ns"]]
    for (phase, position), group in lasting.groupby(["phase", "position"], sort=False):
        # The first iteration begins with its first phase: it alone may have no `other` before it.
        lacking = every - set(group["iteration"])
        if not lacking or ((phase, position) == (OTHER, 0) and lacking == {min(every)}):
            groups.append((float((group["start_ns"] - group["origin_ns"]).median()), str(phase), group))
    segments = []
    reached = 0.0
    for _, phase, group in sorted(groups, key=lambda item: item[0]):
        starts, ends = group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64)
        length = float(np.median(ends - starts))
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
        paired = [_lower(*pair) for pair in zip(envelopes[::2], envelopes[1::2], strict=False)]
        envelopes = paired + envelopes[len(paired) * 2 :]
    return envelopes[0]


def _lower(a: Envelope, b: Envelope) -> Envelope:
    positions = merge_times(a[0], b[0])
    values = np.minimum(*(free[np.searchsorted(edges, positions, side="right") - 1] for edges, free in (a, b)))
    changes = np.append(True, np.diff(values) != 0)
    return positions[changes], values[changes]


@recent_per_trace
def phase_table(trace: Trace, rank: int) -> pd.DataFrame:
    """Return the phases of each iteration in order, `other` included; only those in which free memory is known.

    Columns iteration, phase, position, origin_ns (the iteration's start), start_ns, end_ns. position: which one of its
    phase it is within the iteration, from 0; of `other` the number of phases before it. Where the trace has no phases,
    one row spans the samples of free memory, without iteration and phase.
    """
    times = intervals(trace, rank, device_times=False)
    if times.spans.empty:
        samples = memory_timeline(trace, rank, free_pool(trace) or "")[0]
        start, end = int(samples[0]), int(samples[-1])
        row = {"iteration": None, "phase": None, "position": 0, "origin_ns": start, "start_ns": start, "end_ns": end}
        return pd.DataFrame([row], dtype=object)
    phases = times.with_other.sort_values("start_ns", kind="stable")
    # `other` is numbered by the phases before it: the first iteration may have none at its start.
    phases_before = (phases["phase"] != OTHER).groupby(phases["iteration"]).cumsum()
    nth = phases.groupby(["iteration", "phase"]).cumcount()
    phases["position"] = phases_before.where(phases["phase"] == OTHER, nth)
    origins = times.spans[["iteration", "start_ns"]].rename(columns={"start_ns": "origin_ns"})
    bounds = (phases[column].to_numpy(np.int64) for column in ("start_ns", "end_ns"))
    phases = phases[within_spans(memory_spans(trace, rank, free_pool(trace) or ""), *bounds)]
    return phases.merge(origins, on="iteration")
