"""Moves of state in and out: parts of a cycle in which the memory of the device changes
and the link carries the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ebbtide.analysis.metrics.devices import link_peak, ran_on_cpu
from ebbtide.analysis.metrics.link_throughput import copies
from ebbtide.features.cycles.part import CyclePart
from ebbtide.features.cycles.spans import CycleSpans
from ebbtide.machines.machine import machine_from
from ebbtide.profiler.trace import Trace

OUT, IN = "out", "in"
_RELEASES = re.compile(
    r"sleep|wake|load|release|free|cache|resume|pause", re.IGNORECASE
)
# No copies: released or made anew.
RELEASED = "memory"
# From this share of the peak on a change of memory, or bytes of copies, are state.
_MIN_SHARE = 0.05
# State is recognized by its size, to within this share.
_SAME_SIZE = 0.05
# From this share of the link's peak on the link bounds a move.
_BOUND_SHARE = 0.7
_MIN_PAGEABLE = 0.5
_SMALL_COPY = 1 << 20


@dataclass(frozen=True)
class Move:
    """A part in which state is moved.

    Attributes:
        part: Its name.
        direction: `out` or `in`, of the device's memory.
        bytes: Bytes that are copied, else those by which the device's memory changes.
        copied_bytes: Bytes that the link carries in that direction; None: not recorded.
        state: The state that has this size, or `state`; `memory` where far less was
            copied: it was released or made anew, as a KV cache is.
        rate: Bytes/s of the copies over the time of the part; None: not known.
        peak_rate: Bytes/s that the link can carry; None: not known.
        is_link_bound: Whether the link bounds the move; None: not known.
        cause: Why the move is slower than the link; None: it is not, or not known.
    """

    part: str
    direction: str
    median_ms: float
    bytes: int
    copied_bytes: int | None
    state: str
    rate: float | None
    peak_rate: float | None
    is_link_bound: bool | None
    cause: str | None

    @property
    def is_copied(self) -> bool:
        """Whether the link carries it, as far as is known."""
        return self.state != RELEASED

    @property
    def fastest_ms(self) -> float | None:
        """Time of the same bytes at the link's peak."""
        if not self.copied_bytes or not self.peak_rate:
            return None
        return min(self.copied_bytes / self.peak_rate * 1e3, self.median_ms)


def find_moves(
    spans: CycleSpans, rank: int, parts: Sequence[CyclePart]
) -> tuple[Move, ...]:
    """Return the moves among the parts of cycles."""
    trace = spans.trace
    peak = max((part.peak_bytes or 0 for part in parts), default=0)
    if not peak or ran_on_cpu(trace):
        return ()
    moves = []
    for part in parts:
        change = part.change_bytes or 0
        if abs(change) < _MIN_SHARE * peak:
            continue
        move = _move(spans, rank, part, change)
        # Any part may release or make tensors; one with such a name does so with state.
        if move.is_copied or _RELEASES.search(part.name):
            moves.append(move)
    return tuple(moves)


def _move(spans: CycleSpans, rank: int, part: CyclePart, change: int) -> Move:
    trace = spans.trace
    direction = IN if change > 0 else OUT
    copied = part.h2d_bytes if change > 0 else part.d2h_bytes
    is_copied = copied is None or copied >= 0.5 * abs(change)
    size, rate = abs(change), None
    if copied is not None and is_copied and part.median_ms > 0:
        size, rate = copied, copied / part.median_ms * 1e3
    peak = _peak_rate(trace, rank, direction)
    bound = None if rate is None or not peak else rate >= _BOUND_SHARE * peak
    return Move(
        part=part.name,
        direction=direction,
        median_ms=part.median_ms,
        bytes=size,
        copied_bytes=copied,
        state=_state(trace, rank, size) if is_copied else RELEASED,
        rate=rate,
        peak_rate=peak,
        is_link_bound=bound,
        cause=_cause(spans, rank, part, direction) if bound is False else None,
    )


def _peak_rate(trace: Trace, rank: int, direction: str) -> float | None:
    """Return the peak of the link, or the rate of a predicted trace's machine."""
    peak = link_peak(trace, rank)
    machine = trace.meta.machine
    if peak is not None or not machine:
        return peak
    rates = machine_from(machine, str(trace.path))
    return rates.h2d_bytes_per_s if direction == IN else rates.d2h_bytes_per_s


def _state(trace: Trace, rank: int, size: int) -> str:
    """Return the name of the state that has a size."""
    info = trace.rank(rank)
    weights = info.model.bytes
    of_optimizers = [entry.state_bytes for entry in info.optimizers]
    optimizer = sum(each or 0 for each in of_optimizers) or None
    sizes = {
        "optimizer state": optimizer,
        "weights": weights,
        "weights and optimizer state": (
            weights + optimizer if weights and optimizer else None
        ),
    }
    for name, each in sizes.items():
        if each and abs(size - each) <= _SAME_SIZE * each:
            return name
    return "state"


def _cause(spans: CycleSpans, rank: int, part: CyclePart, direction: str) -> str | None:
    """Return why the copies of a part are slower than the link."""
    rows = copies(spans.trace, rank, "h2d" if direction == IN else "d2h")
    inside = np.zeros(len(rows.starts), bool)
    for cycle in spans.steady:
        for one in cycle.with_rests():
            if one.name == part.name:
                inside |= (rows.starts >= one.start_ns) & (rows.ends <= one.end_ns)
    own = rows.only(inside)
    if not len(own.starts):
        return None
    sizes = np.nan_to_num(own.bytes)
    pageable = sizes[own.host_memory == "pageable"].sum()
    if pageable > _MIN_PAGEABLE * sizes.sum():
        return "pageable memory"
    if float(np.median(sizes)) < _SMALL_COPY:
        return "small copies"
    return None
