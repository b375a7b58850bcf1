"""Places the iterations of a Megatron-LM log in time, and adds their phases to the tables of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ebbtide.phases import BACKWARD, FORWARD, UPDATE
from ebbtide.profiler.importers.megatron.interval_reader import LoggedInterval
from ebbtide.profiler.trace import RankBuilder

# By version: `forward` and `backward` before 2.0.
_FORWARD, _BACKWARD = ("forward-compute", "forward"), ("backward-compute", "backward")
_BOTH, _UPDATE = "forward-backward", "optimizer"
# Parts of the optimizer's step, in the order in which it takes them.
_UPDATE_PARTS = (
    "optimizer-copy-to-main-grad", "optimizer-unscale-and-check-inf", "optimizer-clip-main-grad",
    "optimizer-count-zeros", "optimizer-inner-step", "optimizer-copy-main-to-model-params",
)  # fmt: skip


@dataclass(frozen=True)
class PlacedIterations:
    """The iterations of one interval in time.

    Attributes:
        interval: What the log has about them.
        first: Number of the first of them in the trace, from 0.
        starts_ns: Their starts.
        ends_ns: Their ends.
    """

    interval: LoggedInterval
    first: int
    starts_ns: np.ndarray
    ends_ns: np.ndarray


def place_iterations(intervals: Sequence[LoggedInterval]) -> list[PlacedIterations]:
    """Place iterations in time, on the log's clock, or from 0 if the log has no times.

    An interval ends at the time of its line, or later, if the iterations since the line before took longer: times in
    full seconds are up to a second early. Iterations of an interval are equally long.
    """
    placed: list[PlacedIterations] = []
    firsts = accumulate((interval.count for interval in intervals), initial=0)
    end_ns: int | None = None
    for interval, first in zip(intervals, firsts, strict=False):
        length_ns = round(interval.iteration_ms * 1e6)
        total_ns = interval.count * length_ns
        earliest = [] if end_ns is None else [end_ns + total_ns]
        own = [] if interval.t_ns is None else [interval.t_ns]
        end_ns = max(earliest + own, default=total_ns)
        ends = end_ns - length_ns * np.arange(interval.count - 1, -1, -1, dtype=np.int64)
        placed.append(PlacedIterations(interval, first, ends - length_ns, ends))
    return placed


def add_iterations(entry: RankBuilder, rank: int, placed: Sequence[PlacedIterations], offset_ns: int) -> bool:
    """Add the iterations to a rank: marks, phases, and parts of the update as ops.

    The update ends with its iteration, and the phases before it follow each other.

    Args:
        entry: Builder of the rank.
        rank: Its number.
        placed: The iterations.
        offset_ns: Offset of the log's clock from UTC.

    Returns:
        Whether timers had to be shortened, because they add up to more than the iteration.
    """
    shortened = False
    for iterations in placed:
        interval, ends = iterations.interval, iterations.ends_ns - offset_ns
        numbers = iterations.first + np.arange(interval.count)
        entry.extend("iteration_marks", iteration=numbers, start_ns=iterations.starts_ns - offset_ns, end_ns=ends)
        forward, backward = interval.timer_ms(rank, *_FORWARD), interval.timer_ms(rank, *_BACKWARD)
        both, update = interval.timer_ms(rank, _BOTH), interval.timer_ms(rank, _UPDATE)
        split = forward is not None and backward is not None
        computed = max(both or 0.0, (forward or 0.0) + (backward or 0.0) if split else 0.0)
        total = computed + (update or 0.0)
        scale = min(1.0, interval.iteration_ms / total) if total else 1.0
        shortened |= scale < 1
        lengths = {name: round(ms * scale * 1e6) for name, ms in _lengths(forward, backward, update).items()}
        update_starts = ends - lengths.get(UPDATE, 0)
        starts = update_starts - round(computed * scale * 1e6)
        if not split and both is not None:
            _add_op(entry, _BOTH, starts, update_starts, numbers)
        for phase in (FORWARD, BACKWARD) if split else ():
            _add_phase(entry, phase, starts, starts + lengths[phase], numbers)
            starts = starts + lengths[phase]
        if update is not None:
            _add_phase(entry, UPDATE, update_starts, ends, numbers)
            for name in _UPDATE_PARTS:
                part = interval.timer_ms(rank, name)
                if part is not None:
                    part_ends = np.minimum(update_starts + round(part * scale * 1e6), ends)
                    _add_op(entry, name, update_starts, part_ends, numbers)
                    update_starts = part_ends
    return shortened


def _lengths(forward: float | None, backward: float | None, update: float | None) -> dict[str, float]:
    lengths = {FORWARD: forward, BACKWARD: backward, UPDATE: update}
    return {phase: ms for phase, ms in lengths.items() if ms is not None}


def _add_phase(entry: RankBuilder, phase: str, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray) -> None:
    entry.extend("phases", phase=phase, iteration=numbers, micro_step=0, start_ns=starts, end_ns=ends)


def _add_op(entry: RankBuilder, name: str, starts: np.ndarray, ends: np.ndarray, numbers: np.ndarray) -> None:
    entry.extend("ops", start_ns=starts, end_ns=ends, resource="host", name=name, iteration=numbers)
