"""Free memory across the parts of a cycle, and what to change about moves of state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from ebbtide.features.cycles.cycles import Cycles
from ebbtide.features.cycles.moves import IN, OUT, Move
from ebbtide.features.cycles.part import CyclePart
from ebbtide.units import bytes_text, ms_text

# A window has this share of the capacity more than what is always free.
_MIN_WINDOW_SHARE = 0.05
# Sizes of the same state on its way out and in differ by at most this share.
_SAME_SIZE = 0.1
# A change that saves a smaller share of a cycle is none.
_MIN_SAVED_SHARE = 0.02


@dataclass(frozen=True)
class FreeWindow:
    """Parts that follow each other with more free memory than the others.

    Attributes:
        parts: Their names.
        median_ms: Their time in a cycle.
        free_bytes: Memory that is free all that time.
    """

    parts: tuple[str, ...]
    median_ms: float
    free_bytes: int


@dataclass(frozen=True)
class CycleChange:
    """Something to change, computed from the times and bytes of the cycle.

    Attributes:
        kind: `keep`, `overlap` or `pin`.
        text: What to do.
        saved_ms: Time of a cycle that it saves; at most, where it is `overlap`.
        evidence: The figures that it follows from.
    """

    kind: str
    text: str
    saved_ms: float
    evidence: str


@dataclass(frozen=True)
class CycleAdvice:
    """The free windows of a cycle, and changes, the one that saves most first."""

    windows: tuple[FreeWindow, ...]
    changes: tuple[CycleChange, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the keys of `ebbtide cycles --json` for it."""
        return asdict(self)


def advise(cycles: Cycles) -> CycleAdvice:
    """Return the free windows of a cycle and what to change about it."""
    changes = [
        change
        for change in _changes(cycles)
        if change.saved_ms >= _MIN_SAVED_SHARE * cycles.median_ms
    ]
    changes.sort(key=lambda change: -change.saved_ms)
    return CycleAdvice(tuple(_windows(cycles)), tuple(changes))


def _windows(cycles: Cycles) -> Iterator[FreeWindow]:
    parts = [part for part in cycles.parts if part.min_free_bytes is not None]
    if not parts or not cycles.capacity_bytes:
        return
    always = min(part.min_free_bytes or 0 for part in parts)
    least = always + _MIN_WINDOW_SHARE * cycles.capacity_bytes

    def is_free(part: CyclePart) -> bool:
        return (part.min_free_bytes or 0) >= least

    for free, group in groupby(parts, is_free):
        run = [*group]
        if free:
            yield FreeWindow(
                tuple(part.name for part in run),
                sum(part.median_ms for part in run),
                min(part.min_free_bytes or 0 for part in run),
            )


def _changes(cycles: Cycles) -> Iterator[CycleChange]:
    copied = [move for move in cycles.moves if move.is_copied]
    kept = set()
    for out in copied:
        back = next((move for move in copied if _is_back(out, move)), None)
        if out.direction != OUT or back is None:
            continue
        away = _between(cycles.parts, out.part, back.part)
        free = [part.min_free_bytes for part in away]
        if any(size is None or size < out.bytes for size in free):
            continue
        kept |= {out.part, back.part}
        least = min((size for size in free if size is not None), default=0)
        yield CycleChange(
            "keep",
            f"keep the {out.state} ({bytes_text(out.bytes)}) on the device",
            out.median_ms + back.median_ms,
            f"{bytes_text(least)} are free while it is away",
        )
    for move in copied:
        if move.part not in kept:
            yield from _faster(cycles.parts, move)


def _is_back(out: Move, move: Move) -> bool:
    same = abs(move.bytes - out.bytes) <= _SAME_SIZE * out.bytes
    return move.direction == IN and same


def _between(parts: Sequence[CyclePart], first: str, last: str) -> list[CyclePart]:
    """Return the parts after one and before another, around the end of the cycle."""
    names = [part.name for part in parts]
    begin, end = names.index(first) + 1, names.index(last)
    return [*parts[begin:end]] if begin <= end else [*parts[begin:], *parts[:end]]


def _faster(parts: Sequence[CyclePart], move: Move) -> Iterator[CycleChange]:
    fastest_ms = move.fastest_ms
    if move.cause is not None and fastest_ms is not None:
        yield CycleChange(
            "pin",
            f"copy the {move.state} of {move.part} in large pieces from and to pinned "
            "memory",
            move.median_ms - fastest_ms,
            f"{move.cause}: {ms_text(move.median_ms)}, {ms_text(fastest_ms)} at the "
            "link's peak",
        )
    beside = _beside(parts, move)
    if beside:
        time_ms = sum(part.median_ms for part in beside)
        names = ", ".join(part.name for part in beside)
        yield CycleChange(
            "overlap",
            f"copy the {move.state} of {move.part} on another stream, under {names}",
            min(time_ms, fastest_ms or move.median_ms),
            f"{ms_text(time_ms)} with {bytes_text(move.bytes)} free or more",
        )


def _beside(parts: Sequence[CyclePart], move: Move) -> list[CyclePart]:
    """Return the parts, before a way in or after a way out, whose memory has room for
    the state and that do not use it."""
    names = [part.name for part in parts]
    at = names.index(move.part)
    following = [*parts[at + 1 :], *parts[:at]]
    order = following if move.direction == OUT else following[::-1]
    beside = []
    for part in order:
        free = part.min_free_bytes
        is_moved = (part.h2d_bytes or 0) + (part.d2h_bytes or 0) > 0.1 * move.bytes
        if part.iterations or free is None or free < move.bytes or is_moved:
            break
        beside.append(part)
    return beside
