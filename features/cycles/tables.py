"""Cycles as text: the headline, the parts, the moves, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

from ebbtide.analysis.metrics.iteration_mean import mean_text_if_uneven
from ebbtide.analysis.metrics.missing import no_iterations
from ebbtide.analysis.tables.table import (
    Gain,
    Table,
    View,
    free_note,
    ms,
    number,
    share,
    size,
    text,
)
from ebbtide.features.cycles.changes import advise
from ebbtide.features.cycles.cycles import Cycles, slowest_cycles
from ebbtide.features.cycles.moves import OUT, Move
from ebbtide.profiler.trace import Trace
from ebbtide.units import bytes_text, counted, ms_text, rate_text

_SOURCES = {
    "marks": "by the job's marks",
    "ranges": "by the ranges that the job names",
    "repetition": "by the repetition of phases",
}
_MIN_ITERATIONS = 1.5


def headline(cycles: Cycles) -> str:
    """Return the time of a cycle and its longest part."""
    longest = cycles.longest
    mean = mean_text_if_uneven(cycles.mean_ms, cycles.median_ms)
    return (
        f"{ms_text(cycles.median_ms)} a cycle{_of_iterations(cycles)}{mean}, "
        f"{100 * longest.share:.0f} % of it {longest.name}"
    )


def _of_iterations(cycles: Cycles) -> str:
    count = round(cycles.iterations)
    return f" of {counted(count, 'iteration')}" if count else ""


def parts_table(trace: Trace, cycles: Cycles) -> Table:
    """Return the table of the parts of a cycle."""
    columns = (
        text("part", "name"),
        ms("time", "median_ms"),
        share("share", "share"),
        number("runs", lambda part: round(part.runs) if part.runs >= 1.5 else None),
        size(f"peak {cycles.pool or 'memory'}", "peak_bytes"),
        size("free", "min_free_bytes"),
        size("h2d", lambda part: part.h2d_bytes or None),
        size("d2h", lambda part: part.d2h_bytes or None),
    )
    left_out = f", the first {cycles.warmup} left out" if cycles.warmup else ""
    title = f"Medians over {counted(cycles.count - cycles.warmup, 'cycle')}, found "
    has_free = any(part.min_free_bytes is not None for part in cycles.parts)
    return Table(
        "cycle",
        f"{title}{_SOURCES[cycles.source]}{left_out}",
        columns,
        cycles.parts,
        free_note(trace) if has_free else None,
    )


def lead(trace: Trace) -> View:
    """Yield what a summary says of cycles, before its iterations; nothing where there
    are none."""
    cycles = slowest_cycles(trace)
    if cycles is None:
        return
    yield Gain(f"{trace.path}: {headline(cycles)}")
    yield parts_table(trace, cycles)
    yield from _advice_lines(cycles, most=1)


def cycles_view(trace: Trace, cycles: Cycles | None) -> View:
    """Yield the cycles of a rank: parts, moves, free windows and changes."""
    if cycles is None:
        missing = no_iterations(trace) if not trace.ranks else ""
        yield f"{trace.path}: nothing repeats around its iterations{missing}"
        yield (
            'parts that the job marks by `with ebbtide.step("rollout"):` make cycles; '
            "record it again"
        )
        return
    yield Gain(f"{trace.path}: {headline(cycles)}")
    yield parts_table(trace, cycles)
    yield from _advice_lines(cycles)


def _advice_lines(cycles: Cycles, most: int | None = None) -> Iterator[str]:
    advice = advise(cycles)
    yield from map(move_text, cycles.moves)
    for window in advice.windows[:most]:
        yield (
            f"{bytes_text(window.free_bytes)} free for {ms_text(window.median_ms)} of "
            f"each cycle: {', '.join(window.parts)}"
        )
    for change in advice.changes[:most]:
        yield Gain(
            f"DO  {change.text}: saves up to {ms_text(change.saved_ms)} of "
            f"{ms_text(cycles.median_ms)} ({change.evidence})"
        )


def move_text(move: Move) -> str:
    """Return a move of state in a line."""
    if not move.is_copied:
        verb = "released" if move.direction == OUT else "made anew"
        return f"{move.part}: {bytes_text(move.bytes)} {verb} without copies"
    words = f"{move.part}: {bytes_text(move.bytes)}"
    if not move.part.startswith(move.state):
        of_state = "" if move.state == "state" else f" of {move.state}"
        words += f"{of_state} {move.direction}"
    if move.rate is None:
        return f"{words}, copies were not recorded"
    words += f" at {rate_text(move.rate)}"
    if move.is_link_bound is None:
        return words
    peak = rate_text(move.peak_rate or 0.0)
    if move.is_link_bound:
        return f"{words}, bounded by the link ({peak})"
    cause = f"by {move.cause}, " if move.cause else ""
    return f"{words}, bounded {cause}not by the link ({peak})"


def repeats(trace: Trace) -> str | None:
    """Return what a job repeats, in words, where a cycle has several iterations: only
    there some are longer than others."""
    cycles = slowest_cycles(trace)
    if cycles is None or cycles.iterations < _MIN_ITERATIONS:
        return None
    names = [part.name for part in cycles.parts]
    parts = ", ".join(names[:4]) + (" and more" if len(names) > 4 else "")
    return (
        f"a cycle of {ms_text(cycles.median_ms)} has "
        f"{counted(round(cycles.iterations), 'iteration')}: {parts}"
    )
