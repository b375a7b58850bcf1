"""The figures of cycles: time, memory and copies of each part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ebbtide.analysis.metrics.cache import once_per_trace
from ebbtide.analysis.metrics.devices import (
    capacity_bytes,
    free_pool,
    memory_timeline,
    peak_pool,
)
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import traffic
from ebbtide.analysis.timeseries.statistics import median_or_none
from ebbtide.analysis.timeseries.step_functions import Floats, Ints, peak_between
from ebbtide.features.cycles.marked import marked_cycles, named_cycles
from ebbtide.features.cycles.moves import Move, find_moves
from ebbtide.features.cycles.part import CyclePart
from ebbtide.features.cycles.repetition import AFTER, BEFORE, FORWARDS, repeated_cycles
from ebbtide.features.cycles.spans import OTHER, CycleSpan, CycleSpans
from ebbtide.profiler.trace import Trace

_TRAINING = "training, not marked"
# Least share of a cycle in forwards without gradients and moves of state.
_MIN_WORK_SHARE = 0.1


@dataclass(frozen=True)
class Cycles:
    """The cycles of a rank.

    Attributes:
        source: `marks` of ebbtide.step, `ranges` that the job names for its profiler,
            or `repetition` of phases.
        count: Number of whole cycles.
        warmup: How many of them the figures leave out.
        iterations: Iterations in a cycle, in the median.
        median_ms, mean_ms: Time of a cycle.
        parts: The parts, in the order of a cycle.
        moves: The parts that move state in or out.
    """

    rank: int
    source: str
    count: int
    warmup: int
    iterations: float
    median_ms: float
    mean_ms: float
    pool: str | None
    free_pool: str | None
    capacity_bytes: int | None
    parts: tuple[CyclePart, ...]
    moves: tuple[Move, ...]

    @property
    def longest(self) -> CyclePart:
        """The part with the largest share."""
        return max(self.parts, key=lambda part: part.share)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `ebbtide cycles --json` has for a rank."""
        return asdict(self)


@once_per_trace
def cycle_spans(trace: Trace, rank: int) -> CycleSpans | None:
    """Return the times of the cycles of a rank; None where it has none."""
    return (
        marked_cycles(trace, rank)
        or named_cycles(trace, rank)
        or repeated_cycles(trace, rank)
    )


def find_cycles(trace: Trace, rank: int) -> Cycles | None:
    """Return the figures of the cycles of a rank; None where it has none."""
    measured = measured_cycles(trace, rank)
    return None if measured is None else measured[0]


@once_per_trace
def measured_cycles(trace: Trace, rank: int) -> tuple[Cycles, CycleSpans] | None:
    """Return the figures of the cycles of a rank, and their times with the same names
    of parts; None where it has none."""
    spans = cycle_spans(trace, rank)
    if spans is None:
        return None
    first = _measure(trace, rank, spans)
    if spans.source != "repetition":
        # Without phases it is not certain that training is in the rest.
        has_phases = len(trace.columns(rank, "phases")) > 0
        names = {
            part.name: _TRAINING
            for part in first.parts
            if has_phases and _is_training(part)
        }
    elif _has_work(first):
        names = _names_of_moves(first)
    else:
        return None
    if not names:
        return first, spans
    spans = spans.renamed(names)
    return _measure(trace, rank, spans), spans


def _is_training(part: CyclePart) -> bool:
    """Return whether iterations end in the time that the job has not named."""
    return part.name == OTHER and part.iterations >= 1


def _has_work(cycles: Cycles) -> bool:
    """Return whether forwards and moves of state are more than moments of a cycle,
    where it is one by its forwards: time between iterations alone is none."""
    shares = {part.name: part.share for part in cycles.parts}
    if FORWARDS not in shares:
        return True
    moved = {move.part for move in cycles.moves}
    return sum(shares[name] for name in {FORWARDS, *moved}) >= _MIN_WORK_SHARE


def _names_of_moves(cycles: Cycles) -> dict[str, str]:
    """Return names of the unmarked parts that move state."""
    return {
        move.part: f"{move.state} {move.direction}"
        for move in cycles.moves
        if move.part in (BEFORE, AFTER)
    }


def _measure(trace: Trace, rank: int, spans: CycleSpans) -> Cycles:
    steady = spans.steady
    lengths = np.array([cycle.length_ns for cycle in steady]) / 1e6
    ends = intervals(trace, rank).ends
    per_cycle = [_count(ends, cycle.start_ns, cycle.end_ns) for cycle in steady]
    pool, pool_of_free = peak_pool(trace), free_pool(trace)
    parts = _parts(spans, rank, float(lengths.sum()), ends)
    return Cycles(
        rank=rank,
        source=spans.source,
        count=len(spans.spans),
        warmup=len(spans.spans) - len(steady),
        iterations=float(np.median(per_cycle)),
        median_ms=float(np.median(lengths)),
        mean_ms=float(lengths.mean()),
        pool=pool,
        free_pool=pool_of_free,
        capacity_bytes=capacity_bytes(trace, rank),
        parts=parts,
        moves=find_moves(spans, rank, parts),
    )


@once_per_trace
def slowest_cycles(trace: Trace) -> Cycles | None:
    """Return the cycles of the rank with the longest ones; None where no rank has
    any."""
    each = [find_cycles(trace, rank) for rank in trace.ranks]
    return max(
        (cycles for cycles in each if cycles is not None),
        key=lambda cycles: cycles.median_ms,
        default=None,
    )


def cycle_figures(trace: Trace) -> dict[str, Any] | None:
    """Return count, time and parts of the cycles of the slowest rank, for JSON; None
    where no rank has any."""
    cycles = slowest_cycles(trace)
    if cycles is None:
        return None
    parts = [
        {"name": part.name, "ms": part.median_ms, "peak_bytes": part.peak_bytes}
        for part in cycles.parts
    ]
    return {"count": cycles.count, "median_ms": cycles.median_ms, "parts": parts}


def _count(ends: Ints, start_ns: int, end_ns: int) -> int:
    return int(((ends > start_ns) & (ends <= end_ns)).sum())


@dataclass(frozen=True)
class Pieces:
    """The times in which a part runs, an entry for each run.

    `cycles`: the number of the cycle of each.
    """

    cycles: Ints
    starts: Ints
    ends: Ints

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the runs of each cycle that has the part."""
        numbers, position = np.unique(self.cycles, return_inverse=True)
        totals = np.zeros(len(numbers))
        np.add.at(totals, position, values)
        return totals


def pieces_by_part(cycles: Sequence[CycleSpan]) -> dict[str, Pieces]:
    """Return the runs of each part, in the order in which parts begin."""
    rows: dict[str, list[tuple[int, int, int]]] = {}
    for number, cycle in enumerate(cycles):
        for part in cycle.with_rests():
            row = (number, part.start_ns, part.end_ns)
            rows.setdefault(part.name, []).append(row)
    return {
        name: Pieces(*(np.array(column, np.int64) for column in zip(*own, strict=True)))
        for name, own in rows.items()
    }


def _parts(
    spans: CycleSpans, rank: int, total_ms: float, ends: Ints
) -> tuple[CyclePart, ...]:
    trace = spans.trace
    pool, pool_of_free = peak_pool(trace), free_pool(trace)
    used = memory_timeline(trace, rank, pool) if pool else None
    taken = memory_timeline(trace, rank, pool_of_free) if pool_of_free else None
    capacity = capacity_bytes(trace, rank)
    parts = []
    for name, pieces in pieces_by_part(spans.steady).items():
        lengths = (pieces.ends - pieces.starts) / 1e6
        ran = np.unique(pieces.cycles)
        counts = [
            _count(ends, start, end)
            for start, end in zip(pieces.starts, pieces.ends, strict=True)
        ]
        least = None
        if taken is not None and capacity is not None:
            most = _peaks(taken, pieces)
            if not np.isnan(most).all():
                least = max(capacity - int(np.nanmax(most)), 0)
        parts.append(
            CyclePart(
                name=name,
                runs=len(pieces.cycles) / len(ran),
                median_ms=float(np.median(pieces.sums(lengths))),
                share=float(lengths.sum()) / total_ms,
                iterations=sum(counts) / len(ran),
                peak_bytes=None if used is None else _bytes(_peaks(used, pieces)),
                min_free_bytes=least,
                change_bytes=None if used is None else _change(used, pieces),
                h2d_bytes=_moved(trace, rank, "h2d", pieces),
                d2h_bytes=_moved(trace, rank, "d2h", pieces),
            )
        )
    return tuple(parts)


def _peaks(timeline: tuple[Ints, Ints], pieces: Pieces) -> Floats:
    """Return the peak of each run.

    What is released at its start belongs to the part before.
    """
    return peak_between(*timeline, pieces.starts + 1, pieces.ends - 1)


def _change(timeline: tuple[Ints, Ints], pieces: Pieces) -> int | None:
    starts = peak_between(*timeline, pieces.starts, pieces.starts)
    ends = peak_between(*timeline, pieces.ends, pieces.ends)
    return _bytes(pieces.sums(ends - starts))


def _moved(trace: Trace, rank: int, direction: str, pieces: Pieces) -> int | None:
    moved = traffic(trace, rank, direction)
    if moved is None:
        return None
    return _bytes(pieces.sums(moved.bytes(pieces.starts, pieces.ends)))


def _bytes(values: Floats) -> int | None:
    median = median_or_none(values)
    return None if median is None else round(median)
