"""The tables of the differences of two traces."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ebbtide.analysis.metrics.prediction import PREDICTED
from ebbtide.analysis.tables.activity import short_name
from ebbtide.analysis.tables.summary import TOTALS
from ebbtide.analysis.tables.table import (
    Column,
    Table,
    View,
    ms,
    signed,
    size,
    text,
)
from ebbtide.features.diff.comparison import Change, Diff, TimeChange
from ebbtide.features.diff.gate import LimitResult
from ebbtide.units import NO_VALUE, NOT_KNOWN, bytes_text, ms_text

# Pools whose peak may be the largest change: the memory that a job requests from its
# device.
_DEVICE_POOLS = ("device", "allocated", "heap")
# Sizes of the same job differ by less than this share from run to run.
_MIN_SHARE = 0.01
# Changes of sizes and of settings on a screen.
_MAX_CHANGES = 3
# Kernels of `-v`; `--json` has all.
_MAX_KERNELS = 20

Text = Callable[[float | None], str]
_SIZES = {
    "peak_bytes": "peak ",
    "min_free_bytes": "free at peak, ",
    "h2d_bytes": "h2d, ",
    "d2h_bytes": "d2h, ",
}
_UNCERTAIN = (
    "Size uncertain: differs, by less than 3 standard errors: run more iterations."
)
_LIMIT_NOTE = (
    "At least: the growth that the iterations show with 95 % confidence, which the "
    "limit is compared with."
)


def diff_view(
    diff: Diff,
    verbose: bool = True,
    results: Sequence[LimitResult] = (),
    by: str | None = None,
) -> View:
    """Return how limits are kept, the largest change, and the changes.

    Changes are of times, sizes and setup; without `verbose` the largest ones. `by`:
    `kernel` or `operator`, whose times are the only table then.
    """
    if results:
        failed = [result.limit.quantity for result in results if result.fails]
        yield (
            f"FAIL: {', '.join(failed)} above the limit."
            if failed
            else "PASS: all limits are kept."
        )
        note = None if all(result.is_exact for result in results) else _LIMIT_NOTE
        yield Table("limits", "Limits", _LIMIT_COLUMNS, results, note, max_rows=None)
    yield headline(diff)
    runs = zip("AB", (diff.a, diff.b), diff.counted, diff.predicted, strict=True)
    for letter, path, counted, predicted in runs:
        origin = f", {PREDICTED}" if predicted else ""
        yield f"{letter}: {path}{origin}, {counted} counted iterations"
    if by is not None:
        if not (table := _work_table(diff, by, _MAX_KERNELS)):
            is_known = diff.kernels if by == "kernel" else diff.operators
            yield (
                f"No {by} differs."
                if is_known
                else f"Not known in both runs: the {by}s. Import their files again."
            )
        yield table
        return
    times = [change for change in diff.median_ms if _is_recorded(change)]
    spread = (text("B - A may be ms", _possible), text("verdict", _verdict))
    note = (
        _interval_note(diff)
        if verbose
        else _UNCERTAIN
        if any(time.is_uncertain for time in times)
        else None
    )
    yield Table(
        "median_ms",
        "Median times",
        (*_columns("phase", ms, times), *spread),
        times,
        note,
    )
    if not all(diff.counted):
        totals = [
            replace(change, name=TOTALS[change.name][0])
            for change in diff.totals
            if _is_recorded(change)
        ]
        units = [
            change.name.endswith("_ms")
            for change in diff.totals
            if _is_recorded(change)
        ]
        for column, is_time in ((ms, True), (size, False)):
            rows = [
                row for row, unit in zip(totals, units, strict=True) if unit == is_time
            ]
            yield _changes("totals", "Whole traces, all ranks", rows, column)
    sizes = [
        replace(change, name=prefix + change.name)
        for key, prefix in _SIZES.items()
        for change in getattr(diff, key)
        if _is_recorded(change) and (verbose or _share(change, [change]) >= _MIN_SHARE)
    ]
    yield _work_table(diff, "kernel", _MAX_KERNELS if verbose else _MAX_CHANGES)
    settings = diff.setting_changes
    shown = None if verbose else _MAX_CHANGES
    title = "Memory, and bytes copied per iteration" + (
        "" if verbose else f" (changes of {100 * _MIN_SHARE:.0f} %)"
    )
    # Peaks of the device's memory, and those with the largest ratios, in their order.
    largest = sorted(sizes, key=_size_key)[:shown]
    yield _changes(
        "sizes", title, [change for change in sizes if change in largest], size
    )
    columns = (
        text("setting", "setting"),
        text("A", lambda row: _value_text(row.a)),
        text("B", lambda row: _value_text(row.b)),
    )
    yield Table(
        "settings", "Differences of the setup", columns, settings[:shown], max_rows=None
    )
    if not verbose:
        hidden = len(settings) - _MAX_CHANGES
        yield (
            "all sizes, what the intervals "
            f"mean{f', {hidden} more settings' if hidden > 0 else ''}: -v"
        )


def _work_table(diff: Diff, by: str, max_rows: int) -> Table:
    changes = {"kernel": diff.kernels, "operator": diff.operators}[by]
    rows = [change for change in changes if change.difference][:max_rows]
    if by == "kernel":
        rows = [replace(change, name=short_name(change.name)) for change in rows]
    note = (
        f"Means over the steady iterations of the first rank. {by.capitalize()}s that "
        "a run does not have take 0 ms."
    )
    return Table(f"{by}s", f"Time by {by}", _columns(by, ms, rows), rows, note)


def _figure(value: str) -> Callable[[LimitResult], str]:
    """Return a function from a result to one of its two figures as text."""
    return lambda result: (bytes_text if "_" in result.limit.quantity else ms_text)(
        getattr(result, value)
    )


def _percent(value: str) -> Callable[[LimitResult], str]:
    return lambda result: f"{100 * getattr(result, value):+.1f} %"


_LIMIT_COLUMNS = (
    text("quantity", lambda result: result.limit.quantity),
    text("A", _figure("a")),
    text("B", _figure("b")),
    text("B - A", _percent("share")),
    text(
        "at least",
        lambda result: None if result.is_exact else _percent("low_share")(result),
    ),
    text("limit", lambda result: f"{100 * result.limit.share:+g} %"),
    text("verdict", lambda result: "FAIL" if result.fails else "pass"),
)


def headline(diff: Diff) -> str:
    """Return the largest change in one sentence.

    This is the iteration, else the largest of the times, that can be told apart from
    noise; else the largest of the peaks; else the largest of all bytes copied in a
    direction."""
    iteration, *phases = diff.median_ms
    if iteration.is_distinguishable:
        return _sentence("an iteration takes", iteration, ms_text).replace(
            "Largest change: an", "An"
        )
    times = [time for time in phases if time.is_distinguishable]
    if times:
        time = max(
            times, key=lambda time: (not time.is_uncertain, abs(time.difference or 0))
        )
        return _sentence(f"{time.name} takes", time, ms_text)
    sizes = [
        (_share(c, [c]), f"the peak of {c.name} memory is", c)
        for c in diff.peak_bytes
        if c.name in _DEVICE_POOLS
    ]
    has_peak = max(sizes, default=(0.0,))[0] >= _MIN_SHARE
    for direction, moved in (("h2d", diff.h2d_bytes), ("d2h", diff.d2h_bytes)):
        if has_peak:
            break
        sizes += [
            (_share(change, moved), f"{change.name} copies {direction}", change)
            for change in moved
        ]
    share, subject, size = max(sizes, key=lambda size: size[0])
    if share >= _MIN_SHARE:
        return _sentence(subject, size, bytes_text)
    if all(time.is_distinguishable is None for time in diff.median_ms):
        return (
            "Times cannot be compared: that takes three counted iterations in each run."
        )
    return "No difference of times can be told apart from noise."


def _changes(
    name: str, title: str, rows: Sequence[Change], column: Callable[..., Column]
) -> Table:
    return Table(name, title, _columns("figure", column, rows), rows, max_rows=None)


def _is_recorded(change: Change) -> bool:
    return (change.a, change.b) != (None, None)


def _columns(
    label: str, kind: Callable[..., Column], rows: Sequence[Change]
) -> tuple[Column, ...]:
    """Return the columns of changes. Both runs and their difference have the unit that
    suits the largest value."""
    values = [value for row in rows for value in (row.a, row.b)]
    formatter = kind("", "").formatter
    assert formatter is not None
    to_text, unit = formatter(values)

    def column(name: str, attribute: str) -> Column:
        return replace(kind(name, attribute), formatter=lambda _: (to_text, unit))

    return (
        text(label, "name"),
        column("A", "a"),
        column("B", "b"),
        signed(column("B - A", "difference")),
        text("B / A", lambda row: None if row.ratio is None else f"{row.ratio:.2f}"),
    )


def _share(change: Change, parts: list[Change]) -> float:
    """Return a change as a share of the sum of all parts.

    The sum is of the run where it is larger.
    """
    total = max(sum(part.a or 0 for part in parts), sum(part.b or 0 for part in parts))
    return abs(change.difference or 0) / (total or 1)


def _size_key(change: Change) -> tuple[bool, float]:
    """Return the order in which sizes are shown."""
    is_peak = change.name.removeprefix(_SIZES["peak_bytes"]) in _DEVICE_POOLS
    return not is_peak, -_share(change, [change])


def _sentence(subject: str, change: Change, to_text: Text) -> str:
    factor = ""
    if change.ratio:
        words = (
            ("slower", "faster")
            if isinstance(change, TimeChange)
            else ("as much", "less")
        )
        factor = (
            f", {max(change.ratio, 1 / change.ratio):.2f}x {words[change.ratio < 1]}"
        )
    if isinstance(change, TimeChange) and change.is_uncertain:
        factor += f" (size uncertain: B - A may be {_possible(change)} ms)"
    return (
        f"Largest change: {subject} {to_text(change.b)} in B and {to_text(change.a)} "
        f"in A{factor}."
    )


def _verdict(change: TimeChange) -> str:
    if change.is_distinguishable is None:
        return NOT_KNOWN
    if not change.is_distinguishable:
        return "may be noise"
    return "size uncertain" if change.is_uncertain else "differs"


def _possible(change: TimeChange) -> str | None:
    """Return the interval of the difference in ms as text."""
    if change.interval is None:
        return None
    low, high = (
        ms_text(end).removesuffix(" ms")
        for end in (change.interval.low, change.interval.high)
    )
    return (
        f"{'+' if change.interval.low > 0 else ''}{low} to "
        f"{'+' if change.interval.high > 0 else ''}{high}"
    )


def _interval_note(diff: Diff) -> str | None:
    """Return what the intervals of the differences mean."""
    intervals = [
        change.interval for change in diff.median_ms if change.interval is not None
    ]
    if not intervals:
        return None
    confidence = min(interval.confidence for interval in intervals)
    few = f"; {min(diff.counted)} iterations allow no more" if confidence < 0.99 else ""
    return (
        "B - A may be: the differences that the iterations allow, with "
        f"{100 * confidence:.0f} % confidence{few}. "
        f"May be noise: chance alone may explain the difference. {_UNCERTAIN}"
    )


def _value_text(value: Any) -> str:
    if value is None:
        return NO_VALUE
    if isinstance(value, list):
        return shlex.join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
