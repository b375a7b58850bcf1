"""The tables of windows of free memory."""

from collections.abc import Sequence

from ebbtide.analysis.metrics.devices import free_memory_text
from ebbtide.analysis.metrics.missing import link_reasons
from ebbtide.analysis.metrics.windows import Window, Windows
from ebbtide.analysis.tables.table import (
    Column,
    Gain,
    Table,
    View,
    always_free,
    count,
    free_note,
    ms,
    number,
    share,
    size,
    text,
)
from ebbtide.profiler.trace import Trace
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text, ms_text

# Rows of each table in the report and on a terminal.
_MAX_RECURRING = 40
_MAX_LONGEST = 12
_SHORT_SHARE = 0.01
_SOURCE = "ebbtide windows --json"
_FITS = (
    f"Fits: parameters whose optimizer state ({STATE_BYTES} B each) fits into the "
    "window; streams: parameters that "
    "could be copied in, updated and copied out during it."
)
_IDLE = (
    "Idle: share of the time without a copy; where only counters were recorded, unused "
    "share of the link's peak rate."
)
COLUMNS: tuple[Column, ...] = (
    text("phase", "phase"),
    number("iteration", "iteration"),
    ms("from", "start_ms"),
    ms("to", "end_ms"),
    ms("length", "length_ms"),
    size("least free", "free_bytes"),
    share("h2d idle", "h2d_idle_share"),
    share("d2h idle", "d2h_idle_share"),
    count("fits", "resident_params"),
    count("streams", "streamed_params"),
)


def recurring_table(windows: Windows, ranks: Sequence[int] | None = None) -> Table:
    """Return the table of the windows that every iteration of some ranks (None: of all)
    has, the longest first."""
    rows = [
        window for window in windows.guaranteed if ranks is None or window.rank in ranks
    ]
    memory = " of host memory" if windows.memory == "host" else ""
    title = f"At least {bytes_text(windows.min_bytes)}{memory} free in every iteration"
    note = "Times are those of an iteration of median phases." + (
        f" {_FITS}" if windows.memory == "device" else ""
    )
    if any((row.h2d_idle_share, row.d2h_idle_share) != (None, None) for row in rows):
        note += f" {_IDLE}"
    return Table("guaranteed", title, COLUMNS, rows, note, _SOURCE, _MAX_RECURRING)


def longest_table(windows: Windows) -> Table:
    """Return the table of all windows, the longest first."""
    rows = sorted(windows.windows, key=lambda window: -window.length_ms)
    origin = "iteration" if any(row.iteration is not None for row in rows) else "trace"
    note = f"Times count from the start of the {origin}." + (
        f" {_FITS}" if windows.memory == "device" else ""
    )
    return Table(
        "windows", "The longest windows", COLUMNS, rows, note, _SOURCE, _MAX_LONGEST
    )


def reason_for_none(windows: Windows) -> str:
    """Return why memory that is known is never free in the size asked for."""
    too_much = (
        windows.capacity_bytes is not None
        and windows.min_bytes > windows.capacity_bytes
    )
    smaller = (
        f"the {windows.memory} is smaller"
        if too_much
        else "try a smaller `--min-bytes`"
    )
    return f"never {bytes_text(windows.min_bytes)} free: {smaller}"


def windows_view(trace: Trace, windows: Windows, verbose: bool = True) -> View:
    """Return the windows that recur in every iteration.

    With `verbose`, or where none does, return also the longest of all.
    """
    min_text, capacity = (
        bytes_text(windows.min_bytes),
        bytes_text(windows.capacity_bytes),
    )
    on_host = windows.memory == "host"
    if windows.known_ranks:
        memory = "of host memory free" if on_host else "free"
        yield (
            f"{trace.path}: windows with at least {min_text} {memory}, of {capacity} "
            f"({free_memory_text(trace)})"
        )
    yield from windows.remarks
    for missing_line in windows.missing:
        yield missing_line if windows.known_ranks else f"{trace.path}: {missing_line}"
    if not windows.known_ranks:
        return
    if not windows.windows:
        yield reason_for_none(windows)
        return
    if windows.guaranteed:
        yield Gain(f"{_longest_line(trace, windows)}.{always_free(trace)}")
        table = recurring_table(windows)
        yield table if verbose else table.first(_MAX_LONGEST)
    elif any(window.iteration is not None for window in windows.windows):
        yield no_recurring(windows)
    if verbose or not windows.guaranteed:
        yield longest_table(windows)
    yield from _remarks(trace, windows.windows, on_host)


def _longest_line(trace: Trace, windows: Windows) -> str:
    """Return the line on the longest window that every iteration has."""
    window = max(windows.guaranteed, key=lambda one: one.length_ms)
    length = ms_text(window.length_ms)
    on_rank = f" on rank {window.rank}" if len(trace.ranks) > 1 else ""
    rows = [one for one in windows.guaranteed if one.rank == window.rank]
    iteration_ms = next(
        device["iteration_ms"]
        for device in windows.devices
        if device["rank"] == window.rank
    )
    if iteration_ms is not None and sum(
        one.length_ms for one in rows
    ) > iteration_ms * (1 - 1e-6):
        # They fill the whole iteration; most is free in one that is longer than a gap
        # between two phases.
        lasting = [
            one for one in rows if one.length_ms > _SHORT_SHARE * rows[-1].end_ms
        ]
        most = max(lasting or rows, key=lambda one: (one.free_bytes, one.length_ms))
        least, length = min(one.free_bytes for one in rows), ms_text(most.length_ms)
        text = f"Free throughout the iteration{on_rank}: {bytes_text(least)}"
        if most.free_bytes > least:
            text += (
                f"; most in {most.phase}, {bytes_text(most.free_bytes)} for {length}"
            )
        return text
    return (
        f"The longest in every iteration{on_rank}: {length} in {window.phase}, "
        f"{bytes_text(window.free_bytes)} free"
    )


def windows_note(trace: Trace, windows: Windows) -> str:
    """Return what the windows of a rank are, or why there are none, as a paragraph."""
    if windows.missing:
        return windows.missing[0]
    if not windows.windows:
        return f"{reason_for_none(windows)}. {free_note(trace)}"
    note = (
        f"Times with at least {bytes_text(windows.min_bytes)} of "
        f"{bytes_text(windows.capacity_bytes)} free"
    )
    note = f"{note} (`--min-bytes`). {free_note(trace)}"
    if not windows.guaranteed and any(
        window.iteration is not None for window in windows.windows
    ):
        return f"{note} {no_recurring(windows)}."
    return note


def no_recurring(windows: Windows) -> str:
    """Return the line on windows if none recurs."""
    return (
        f"no part of the iteration has {bytes_text(windows.min_bytes)} free in every "
        "iteration"
    )


def _remarks(trace: Trace, windows: Sequence[Window], on_host: bool) -> View:
    if on_host:
        yield (
            "this job ran on the CPU: there is no link, and no GPU whose memory "
            "optimizer state could fit into"
        )
        return
    if any(
        (window.h2d_idle_share, window.d2h_idle_share) != (None, None)
        for window in windows
    ):
        return
    ranks = sorted({window.rank for window in windows})
    if any(len(trace.link(rank)) for rank in ranks):
        yield (
            "the peak rate of the link is not known, so idle shares are not known: "
            "`ebbtide import --link 5x16` "
            "sets it (PCIe generation 5, 16 lanes)"
        )
        return
    reasons = "; ".join(link_reasons(trace, ranks))
    reason = f" ({reasons})" if reasons else ""
    yield f"link use was not recorded{reason}, so idle shares are not known"
