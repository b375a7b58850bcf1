"""Mends the times of wall clocks that were turned back, or set to another zone."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ebbtide.units import counted

_SECOND_NS = 1_000_000_000
# Zones differ by quarters of an hour. Forward only whole hours count: other gaps are
# pauses of the job.
_QUARTER_NS, _HOUR_NS = 900 * _SECOND_NS, 3600 * _SECOND_NS
_MAX_ZONE_HOURS = 26
# Nothing pauses for a year: a clock without a battery begins at 1970.
_MAX_PAUSE_NS = 366 * 24 * _HOUR_NS
# Lines of several hosts may be out of order by this much.
HOSTS_JITTER_NS = 2 * _SECOND_NS
_RECENT = 64
_FIRST_INTERVAL_NS = 60 * _SECOND_NS
# A file with more steps back than this share of its times is not in order of time.
_MAX_STEPS_BACK = 0.1


class ClockJump(NamedTuple):
    """A point at which a clock jumped.

    `t_ns`: the first time after it, as the file has it.
    """

    t_ns: int
    by_ns: int  # Negative: back.
    is_zone: bool  # Whether zones or daylight saving time explain it.


class WallClock:
    """Lets the times of a clock go on where it jumps.

    A jump by a zone is taken back exactly. After other jumps the next time follows a
    usual interval later. Times up to `jitter_ns` before the last one stay as they are.
    """

    def __init__(self, jitter_ns: int = 0) -> None:
        self.jumps: list[ClockJump] = []
        self._jitter_ns = jitter_ns
        self._shift_ns = 0
        self._last_ns: int | None = None
        self._intervals_ns = deque([_FIRST_INTERVAL_NS], maxlen=_RECENT)

    def mended(self, t_ns: int) -> int:
        """Return a time of the file, without the jumps up to it."""
        elapsed = 0
        if self._last_ns is not None:
            elapsed = t_ns + self._shift_ns - self._last_ns
            if -self._jitter_ns <= elapsed < 0:
                return t_ns + self._shift_ns
            elapsed = self._without_jump(t_ns, elapsed)
            if self._intervals_ns[0] == _FIRST_INTERVAL_NS:
                self._intervals_ns.clear()
            self._intervals_ns.append(elapsed)
        self._last_ns = (t_ns if self._last_ns is None else self._last_ns) + elapsed
        return self._last_ns

    def _without_jump(self, t_ns: int, elapsed: int) -> int:
        """Return the time since the last one, and note a jump in it."""
        usual = 2 * max(self._intervals_ns) + 2 * _SECOND_NS
        rest = elapsed % (_QUARTER_NS if elapsed < 0 else _HOUR_NS)
        zone = elapsed - rest
        is_zone = bool(zone) and rest <= usual < _QUARTER_NS
        is_zone &= abs(zone) <= _MAX_ZONE_HOURS * _HOUR_NS
        if elapsed >= 0 and not is_zone and elapsed < _MAX_PAUSE_NS:
            return elapsed
        own = rest if is_zone else int(median(self._intervals_ns))
        self._shift_ns += own - elapsed
        self.jumps.append(ClockJump(t_ns, elapsed - own, is_zone))
        return own

    @property
    def notes(self) -> list[str]:
        """Lines on the jumps, each to follow the name of the file."""
        return jump_notes(self.jumps)


def jump_notes(jumps: list[ClockJump]) -> list[str]:
    """Return a line on the first jump and the number of the others."""
    if not jumps:
        return []
    first = min(jumps)
    moment = datetime.fromtimestamp(first.t_ns // _SECOND_NS, UTC)
    direction = "back" if first.by_ns < 0 else "forward"
    hours, seconds = abs(first.by_ns) / _HOUR_NS, abs(first.by_ns) / _SECOND_NS
    size = f"{hours:g} h" if first.is_zone else f"{seconds:,.0f} s"
    cause = " (daylight saving time, or another zone)" if first.is_zone else ""
    others = f" and {counted(len(jumps) - 1, 'time')} more" if len(jumps) > 1 else ""
    return [
        f"has a clock that goes {direction} by {size}{cause} at "
        f"{moment:%Y-%m-%d %H:%M:%S}{others}: later times are moved to follow on"
    ]


def mended_times(
    times: pd.Series[Any], devices: pd.Series[float]
) -> tuple[pd.Series[Any], list[ClockJump]]:
    """Return the times (Int64, ns) of each device's rows without jumps, and the jumps.

    Rows are in the order of the file; rows that are not in order of time stay.
    """
    mended, jumps = times.copy(), list[ClockJump]()
    for _, own in times.dropna().groupby(devices):
        steps = np.diff(own.to_numpy(np.int64))
        back = int((steps < 0).sum())
        jumped = back or (steps >= _HOUR_NS).any()
        if jumped and back <= max(_MAX_STEPS_BACK * len(steps), len(steps) > 1):
            clock = WallClock()
            mended[own.index] = [clock.mended(int(t_ns)) for t_ns in own]
            jumps += clock.jumps
    return mended, jumps
