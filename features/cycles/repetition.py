"""Finds cycles by what repeats: forwards without gradients or moves of state, then
several updates; or iterations with another number of updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ebbtide.analysis.metrics.iterations import (
    Intervals,
    intervals,
    on_device_clock,
)
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.features.cycles.spans import CycleSpan, CycleSpans, NamedTime
from ebbtide.phases import UPDATE
from ebbtide.profiler.agent.without_gradients import NAME as WITHOUT_GRADIENTS
from ebbtide.profiler.trace import Trace
from ebbtide.profiler.trace.columns import Bools
from ebbtide.units import counted

FORWARDS, BEFORE, AFTER = (
    "forwards without gradients",
    "before these forwards",
    "after these forwards",
)
_MIN_CYCLES = 3
# An epoch with an evaluation at its end is longer than this.
_MAX_UPDATES = 64
# What lies between updates takes at least this share of all time in a cycle of several
# updates, and in one of a single update, which reference models lengthen, too.
_MIN_SHARE, _MIN_SHARE_OF_ONE = 0.1, 0.2
# So many forwards in a row generate something, token by token.
_MIN_GENERATED = 8
# At most this share of cycles may have another number of phases.
_MAX_IRREGULAR = 0.1
# A shorter rest of a gap belongs to the forwards beside it.
_MIN_REST_SHARE = 0.1


@dataclass(frozen=True)
class _Gap:
    """Time between two phases with forwards in it.

    `before`: the number of phases before it.
    """

    before: int
    start_ns: int
    end_ns: int
    forwards: int
    first_ns: int
    last_ns: int


def repeated_cycles(trace: Trace, rank: int) -> CycleSpans | None:
    """Return the cycles that the order of phases shows; None where there are none."""
    spans = _by_forwards(trace, rank) or _by_updates(trace, rank)
    if spans is None:
        return None
    return CycleSpans("repetition", spans, on_device_clock(trace))


def _by_forwards(trace: Trace, rank: int) -> tuple[CycleSpan, ...] | None:
    times = intervals(trace, rank)
    gaps = _gaps(trace, rank, times)
    if len(gaps) < _MIN_CYCLES:
        return None
    befores = np.array([gap.before for gap in gaps])
    steps = np.diff(befores)
    usual = int(np.median(steps))
    irregular = float((steps != usual).mean())
    phases = times.times.phases
    updates = int((phases[befores[0] : befores[-1]] == UPDATE).sum()) / len(steps)
    gap_ns = sum(gap.end_ns - gap.start_ns for gap in gaps[:-1])
    share = gap_ns / max(gaps[-1].start_ns - gaps[0].start_ns, 1)
    if irregular > _MAX_IRREGULAR or not 0 < updates <= _MAX_UPDATES:
        return None
    generates = min(gap.forwards for gap in gaps) >= _MIN_GENERATED
    if updates <= 1:
        if not generates or share < _MIN_SHARE_OF_ONE:
            return None
    elif share < _MIN_SHARE:
        return None
    return tuple(_spans(times, gaps, usual))


def _gaps(trace: Trace, rank: int, times: Intervals) -> list[_Gap]:
    """Return the gaps between phases in which forwards without gradients ran."""
    ops = trace.columns(rank, "ops")
    own: Bools = ops.equal("name", WITHOUT_GRADIENTS)
    starts, ends = ops.ints("start_ns")[own], ops.ints("end_ns")[own]
    if not len(starts) or not len(times.times.starts):
        return []
    begins, finishes = times.times.starts, times.times.ends
    before: Ints = np.searchsorted(begins, starts, side="right")
    gaps = []
    for number in np.unique(before).tolist():
        # Before the first phase and after the last one the trace has no whole gap.
        if not 0 < number < len(begins):
            continue
        inside = before == number
        gaps.append(
            _Gap(
                number,
                int(finishes[number - 1]),
                int(begins[number]),
                int(inside.sum()),
                int(starts[inside].min()),
                int(ends[inside].max()),
            )
        )
    return gaps


def _spans(times: Intervals, gaps: Sequence[_Gap], usual: int) -> list[CycleSpan]:
    """Return the cycle that begins with each gap."""
    ends, phases = times.times.ends, times.times.phases
    spans = []
    lasts = [*(gap.before for gap in gaps[1:]), gaps[-1].before + usual]
    for gap, last in zip(gaps, lasts, strict=True):
        if last - gap.before != usual or last > len(ends):
            continue
        end_ns = int(ends[last - 1])
        updates = int((phases[gap.before : last] == UPDATE).sum())
        training = NamedTime(counted(updates, "update"), gap.end_ns, end_ns)
        parts = (*_parts_of_gap(gap), training)
        spans.append(CycleSpan(gap.start_ns, end_ns, parts))
    return spans


def _parts_of_gap(gap: _Gap) -> list[NamedTime]:
    """Return the forwards of a gap, and what is before and after them."""
    least_ns = _MIN_REST_SHARE * (gap.end_ns - gap.start_ns)
    first_ns, last_ns = gap.first_ns, gap.last_ns
    parts = []
    if first_ns - gap.start_ns >= least_ns:
        parts.append(NamedTime(BEFORE, gap.start_ns, first_ns))
    else:
        first_ns = gap.start_ns
    has_rest = gap.end_ns - last_ns >= least_ns
    parts.append(NamedTime(FORWARDS, first_ns, last_ns if has_rest else gap.end_ns))
    if has_rest:
        parts.append(NamedTime(AFTER, last_ns, gap.end_ns))
    return parts


def _by_updates(trace: Trace, rank: int) -> tuple[CycleSpan, ...] | None:
    """Return the cycles of iterations that differ in their number of updates, as those
    of a GAN whose critic steps more often, or of an outer optimizer."""
    times = intervals(trace, rank)
    of_update = times.times.iterations[times.times.phases == UPDATE]
    counts = Counter(of_update.tolist())
    numbers = times.numbers.tolist()
    updates = [counts[number] for number in numbers]
    if len({*updates}) < 2:
        return None
    most = max(updates)
    lasts = [at for at, count in enumerate(updates) if count == most]
    steps = {after - at for at, after in pairwise(lasts)}
    if len(lasts) <= _MIN_CYCLES or len(steps) != 1:
        return None
    (period,) = steps
    whole = [at for at in lasts if at + 1 >= period]
    patterns = {tuple(updates[at + 1 - period : at + 1]) for at in whole}
    if not 1 < period <= _MAX_UPDATES or len(patterns) != 1:
        return None
    others = counted(updates[whole[0] - 1], "update")
    few = f"{counted(period - 1, 'iteration')} of {others}"
    many = f"an iteration of {counted(most, 'update')}"
    starts, ends = times.starts.tolist(), times.ends.tolist()
    spans = []
    for at in whole:
        first = at + 1 - period
        parts = (
            NamedTime(few, starts[first], starts[at]),
            NamedTime(many, starts[at], ends[at]),
        )
        spans.append(CycleSpan(starts[first], ends[at], parts))
    return tuple(spans)
