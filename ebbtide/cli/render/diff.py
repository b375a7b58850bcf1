"""Prints the differences of two traces."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.units import bytes_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.diff import Change, Diff, TimeChange

# Pools whose peak may be the largest change: the memory that a job requests from its device.
_DEVICE_POOLS = ("device", "allocated", "heap")
# Sizes of the same job differ by less than this share from run to run.
_MIN_SHARE = 0.01

_TOTAL_NAMES = {
    "span_ms": "from first to last record",
    "h2d_bytes": "bytes to the device (h2d)",
    "d2h_bytes": "bytes to the host (d2h)",
    "min_free_bytes": "least free memory",
    "compute_ms": "GPU: compute",
    "communication_ms": "GPU: communication",
    "copy_ms": "GPU: copies",
    "idle_ms": "GPU: idle",
}

Text = Callable[[float | None], str]


def print_diff(diff: Diff) -> None:
    """Print the largest change in one sentence, then all changes of times, sizes and setup."""
    runs = zip("AB", (diff.a, diff.b), diff.counted, diff.predicted, strict=True)
    for letter, path, counted, predicted in runs:
        origin = ", predicted by a dry run" if predicted else ""
        echo(f"{letter}: {path}{origin}, {counted} counted iterations")
    echo(headline(diff))
    if any((change.a, change.b) != (None, None) for change in diff.median_ms):
        times = [
            [*_row(change.name, change, ms_text), _possible(change), _verdict(change)] for change in diff.median_ms
        ]
        columns = ["phase", "A", "B", "B - A", "B / A", "B - A may be", "verdict"]
        print_table("Median times", columns, times)
        if remark := _interval_remark(diff):
            echo(remark)
    if not all(diff.counted):
        rows = [
            _row(_TOTAL_NAMES[change.name], change, ms_text if change.name.endswith("_ms") else bytes_text)
            for change in diff.totals
            if (change.a, change.b) != (None, None)
        ]
        if rows:
            print_table("Whole traces, all ranks", ["figure", "A", "B", "B - A", "B / A"], rows)
    sizes = [
        *((f"peak {change.name}", change) for change in diff.peak_bytes),
        *((f"free at peak, {change.name}", change) for change in diff.min_free_bytes),
        *((f"h2d, {change.name}", change) for change in diff.h2d_bytes),
        *((f"d2h, {change.name}", change) for change in diff.d2h_bytes),
    ]
    size_rows = [_row(name, change, bytes_text) for name, change in sizes if (change.a, change.b) != (None, None)]
    if size_rows:
        print_table("Memory, and bytes copied per iteration", ["figure", "A", "B", "B - A", "B / A"], size_rows)
    if diff.setting_changes:
        settings = [
            [_value_text(value) for value in (change.setting, change.a, change.b)] for change in diff.setting_changes
        ]
        print_table("Differences of the setup", ["setting", "A", "B"], settings)


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


def _share(change: Change, parts: list[Change]) -> float:
    """Return a change as a share of the sum of all parts, in the run where that is larger."""
    total = max(sum(part.a or 0 for part in parts), sum(part.b or 0 for part in parts))
    return abs(change.difference or 0) / (total or 1)


def _sentence(subject: str, change: Change, text: Text) -> str:
    times = "" if change.ratio is None else f", {change.ratio:.2f} times as much"
    return f"Largest change: {subject} {text(change.b)} in B and {text(change.a)} in A{times}."


def _row(name: str, change: Change, text: Text) -> list[str]:
    ratio = "-" if change.ratio is None else f"{change.ratio:.2f}"
    return [name, text(change.a), text(change.b), _signed(change.difference, text), ratio]


def _signed(value: float | None, text: Text) -> str:
    return ("+" if value is not None and value > 0 else "") + text(value)


def _verdict(change: TimeChange) -> str:
    if change.is_distinguishable is None:
        return "not known"
    return "beyond the spread" if change.is_distinguishable else "not distinguishable"


def _possible(change: TimeChange) -> str:
    """Return the interval of the difference as text."""
    if change.interval is None:
        return "-"
    return f"{_signed(change.interval.low, ms_text)} to {_signed(change.interval.high, ms_text)}"


def _interval_remark(diff: Diff) -> str:
    """Return what the intervals of the differences mean."""
    intervals = [change.interval for change in diff.median_ms if change.interval is not None]
    if not intervals:
        return ""
    confidence = min(interval.confidence for interval in intervals)
    few = f"; {min(diff.counted)} iterations allow no more" if confidence < 0.99 else ""
    return (
        f"B - A may be: the differences that the iterations allow, with {100 * confidence:.0f} % confidence{few}. "
        "Not distinguishable: noise alone may explain the difference."
    )


def _value_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
