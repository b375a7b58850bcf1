"""The tables of the differences of two traces."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import Any

from ebbtide.analysis.diff import Change, Diff, TimeChange
from ebbtide.analysis.tables.summary import TOTALS
from ebbtide.analysis.tables.table import NOT_KNOWN, Column, Table, View, text
from ebbtide.units import bytes_text, ms_text

# Pools whose peak may be the largest change: the memory that a job requests from its device.
_DEVICE_POOLS = ("device", "allocated", "heap")
# Sizes of the same job differ by less than this share from run to run.
_MIN_SHARE = 0.01

Text = Callable[[float | None], str]
# Name of a change, the change, and the format of its values.
_Row = tuple[str, Change, Text]


def diff_view(diff: Diff) -> View:
    """Return the largest change in one sentence, then all changes of times, sizes and setup."""
    runs = zip("AB", (diff.a, diff.b), diff.counted, diff.predicted, strict=True)
    for letter, path, counted, predicted in runs:
        origin = ", predicted by a dry run" if predicted else ""
        yield f"{letter}: {path}{origin}, {counted} counted iterations"
    yield headline(diff)
    times = [(change.name, change, ms_text) for change in diff.median_ms]
    if any(_is_recorded(row) for row in times):
        spread = (text("B - A may be", lambda row: _possible(row[1])), text("verdict", lambda row: _verdict(row[1])))
        yield Table("median_ms", "Median times", (*_columns("phase"), *spread), times, _interval_note(diff))
    if not all(diff.counted):
        totals = [
            (TOTALS[change.name][0], change, ms_text if change.name.endswith("_ms") else bytes_text)
            for change in diff.totals
        ]
        yield _changes("totals", "Whole traces, all ranks", totals)
    kinds = {
        "peak ": diff.peak_bytes,
        "free at peak, ": diff.min_free_bytes,
        "h2d, ": diff.h2d_bytes,
        "d2h, ": diff.d2h_bytes,
    }
    sizes = [(prefix + change.name, change, bytes_text) for prefix, changes in kinds.items() for change in changes]
    yield _changes("sizes", "Memory, and bytes copied per iteration", sizes)
    settings = (
        text("setting", "setting"),
        text("A", lambda row: _value_text(row.a)),
        text("B", lambda row: _value_text(row.b)),
    )
    yield Table("settings", "Differences of the setup", settings, diff.setting_changes, max_rows=None)


def headline(diff: Diff) -> str:
    """Return the largest change in one sentence.

    It is the largest of the times that can be told apart from noise. If there is none, it is the largest of the
    sizes, as a share of the peak or of all bytes copied in that direction.
    """
    iteration, *phases = diff.median_ms
    times = [time for time in (*phases, iteration) if time.is_distinguishable]
    if times:
        time = max(times, key=lambda time: abs(time.difference or 0))
        return _sentence("an iteration takes" if time is iteration else f"{time.name} takes", time, ms_text)
    sizes = [(_share(c, [c]), f"the peak of {c.name} memory is", c) for c in diff.peak_bytes if c.name in _DEVICE_POOLS]
    for direction, moved in (("h2d", diff.h2d_bytes), ("d2h", diff.d2h_bytes)):
        sizes += [(_share(change, moved), f"{change.name} copies {direction}", change) for change in moved]
    share, subject, size = max(sizes, key=lambda size: size[0])
    if share >= _MIN_SHARE:
        return _sentence(subject, size, bytes_text)
    if all(time.is_distinguishable is None for time in diff.median_ms):
        return "Times cannot be compared: that takes three counted iterations in each run."
    return "No difference of times can be told apart from noise."


def _changes(name: str, title: str, rows: Sequence[_Row]) -> Table:
    return Table(name, title, _columns("figure"), [row for row in rows if _is_recorded(row)], max_rows=None)


def _is_recorded(row: _Row) -> bool:
    return (row[1].a, row[1].b) != (None, None)


def _columns(label: str) -> tuple[Column, ...]:
    return (
        text(label, lambda row: row[0]),
        text("A", lambda row: row[2](row[1].a)),
        text("B", lambda row: row[2](row[1].b)),
        text("B - A", lambda row: _signed(row[1].difference, row[2])),
        text("B / A", lambda row: None if row[1].ratio is None else f"{row[1].ratio:.2f}"),
    )


def _share(change: Change, parts: list[Change]) -> float:
    """Return a change as a share of the sum of all parts, in the run where that is larger."""
    total = max(sum(part.a or 0 for part in parts), sum(part.b or 0 for part in parts))
    return abs(change.difference or 0) / (total or 1)


def _sentence(subject: str, change: Change, to_text: Text) -> str:
    times = "" if change.ratio is None else f", {change.ratio:.2f} times as much"
    return f"Largest change: {subject} {to_text(change.b)} in B and {to_text(change.a)} in A{times}."


def _signed(value: float | None, to_text: Text) -> str:
    return ("+" if value is not None and value > 0 else "") + to_text(value)


def _verdict(change: TimeChange) -> str:
    if change.is_distinguishable is None:
        return "not known"
    return "beyond the spread" if change.is_distinguishable else "not distinguishable"


def _possible(change: TimeChange) -> str | None:
    """Return the interval of the difference as text."""
    if change.interval is None:
        return None
    return f"{_signed(change.interval.low, ms_text)} to {_signed(change.interval.high, ms_text)}"


def _interval_note(diff: Diff) -> str | None:
    """Return what the intervals of the differences mean."""
    intervals = [change.interval for change in diff.median_ms if change.interval is not None]
    if not intervals:
        return None
    confidence = min(interval.confidence for interval in intervals)
    few = f"; {min(diff.counted)} iterations allow no more" if confidence < 0.99 else ""
    return (
        f"B - A may be: the differences that the iterations allow, with {100 * confidence:.0f} % confidence{few}. "
        "Not distinguishable: noise alone may explain the difference."
    )


def _value_text(value: Any) -> str:
    if value is None:
        return NOT_KNOWN
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
