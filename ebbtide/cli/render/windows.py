"""Prints windows of free memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.cli.printing import echo
from ebbtide.cli.render.tables import print_table
from ebbtide.state_bytes import STATE_BYTES
from ebbtide.units import bytes_text, count_text, ms_text

if TYPE_CHECKING:
    from ebbtide.analysis.metrics.windows import Window, Windows
    from ebbtide.profiler.trace import Trace

# More rows than this are for a program (`--json`), not for a person.
_MAX_WINDOWS = 12


def print_windows(trace: Trace, windows: Windows) -> None:
    """Print the windows that recur in every iteration, and the longest of all."""
    from ebbtide.analysis.metrics.devices import free_memory_text
    from ebbtide.analysis.metrics.missing import link_reasons

    min_text, capacity = bytes_text(windows.min_bytes), bytes_text(windows.capacity_bytes)
    on_host = windows.memory == "host"
    if windows.known_ranks:
        memory = "of host memory free" if on_host else "free"
        echo(f"{trace.path}: windows with at least {min_text} {memory}, of {capacity} ({free_memory_text(trace)})")
    for remark in windows.remarks:
        echo(remark)
    for missing_line in windows.missing:
        echo(missing_line if windows.known_ranks else f"{trace.path}: {missing_line}")
    if not windows.known_ranks:
        return
    if not windows.windows:
        too_much = windows.capacity_bytes is not None and windows.min_bytes > windows.capacity_bytes
        smaller = f"the {windows.memory} is smaller" if too_much else "try a smaller --min-bytes"
        echo(f"never {min_text} free: {smaller}")
        return
    if windows.guaranteed:
        _window_table(
            "Free at the same relative position in every iteration (times within a median iteration)",
            windows.guaranteed,
            on_host,
        )
    elif any(window.iteration is not None for window in windows.windows):
        echo(f"no part of the iteration has {min_text} free in every iteration")
    longest = sorted(windows.windows, key=lambda w: w.start_ms - w.end_ms)[:_MAX_WINDOWS]
    title = f"The {len(longest)} longest of {len(windows.windows)} windows (--json has all)"
    _window_table(title if len(longest) < len(windows.windows) else "All windows", longest, on_host)
    if on_host:
        echo("this job ran on the CPU: there is no link, and no GPU whose memory optimizer state could fit into")
        return
    echo(
        f"fits: parameters whose optimizer state ({STATE_BYTES} B each) fits into the window; streams: parameters that "
        "could be copied in, updated and copied out during it"
    )
    if all(window.h2d_idle_share is None and window.d2h_idle_share is None for window in windows.windows):
        ranks = sorted({window.rank for window in windows.windows})
        if any(len(trace.link(rank)) for rank in ranks):
            echo(
                "the peak rate of the link is not known, so idle shares are not known: `ebbtide import --link 5x16` "
                "sets it (PCIe generation 5, 16 lanes)"
            )
            return
        reasons = "; ".join(link_reasons(trace, ranks))
        reason = f" ({reasons})" if reasons else ""
        echo(f"link use was not recorded{reason}, so idle shares are not known")


def _window_table(title: str, windows: list[Window], on_host: bool) -> None:
    columns = ["phase", "iteration", "from", "to", "length", "least free"]
    columns += [] if on_host else ["h2d idle", "d2h idle", "fits", "streams"]
    print_table(title, columns, [_window_row(window, on_host) for window in windows])


def _window_row(window: Window, on_host: bool) -> list[str]:
    every = "every" if window.phase else "-"
    row = [
        window.phase or "-",
        every if window.iteration is None else str(window.iteration),
        ms_text(window.start_ms),
        ms_text(window.end_ms),
        ms_text(window.end_ms - window.start_ms),
        bytes_text(window.free_bytes),
    ]
    if on_host:
        return row
    shares = (window.h2d_idle_share, window.d2h_idle_share)
    return [
        *row,
        *("-" if share is None else f"{100 * share:.0f} %" for share in shares),
        count_text(window.resident_params),
        count_text(window.streamed_params),
    ]
