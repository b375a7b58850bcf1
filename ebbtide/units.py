"""Formats quantities for people. GB is 1e9, GiB is 2**30; a quantity that is not known
is a dash."""

import re
from collections.abc import Iterable

from ebbtide.errors import SizeError

# The words for values that were not recorded or cannot be known: for a name or a fact
# in a sentence, and for a figure or a cell of a table.
NOT_KNOWN, NO_VALUE = "not known", "-"

RATE_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
# Three digits of a number from here on read as the next unit: 999.9 M is 1 G.
_ROUNDED_UP = 0.9995
# Bytes as callers give them: a number, or text such as 2GiB.
ByteCount = float | str
_SIZE = re.compile(
    r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE
)


def parse_bytes(text: str) -> int:
    """Parse `500MB`, `2GiB` or `1e9` as bytes. Raises ValueError for anything else, and
    for less than a byte."""
    match = _SIZE.fullmatch(text)
    try:
        number, unit, binary = match.groups() if match else ("", "", "")
        scale = (
            1024 ** " KMGT".index(unit.upper())
            if binary and unit
            else _DECIMAL[unit.upper()]
        )
        size = int(float(number) * scale)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: write it like 500MB, 2GiB or 1e9")
    return size


def byte_count(size: object, name: str = "a size") -> float:
    """Return bytes that are given as a number from 0, or as text (see `parse_bytes`).
    Raises SizeError, which begins with the name of the argument, for anything else."""
    if isinstance(size, str):
        try:
            return parse_bytes(size)
        except ValueError as error:
            raise SizeError(f"{name}: {error}") from None
    if isinstance(size, bool) or not isinstance(size, int | float) or not size >= 0:
        raise SizeError(
            f"{name} is {size!r}: it must be bytes, at least 0, or text like 2GiB"
        )
    return size


def bytes_unit(largest: float) -> tuple[float, str]:
    """Return the unit in which `largest` bytes read best as (bytes in one unit, its
    name)."""
    power = 0
    while power + 1 < len(_UNITS) and abs(largest) >= 1024 ** (power + 1):
        power += 1
    return 1024.0**power, _UNITS[power]


def bytes_text(size: float | None) -> str:
    """Format bytes, as in `1.50 GiB`."""
    if size is None:
        return NO_VALUE
    scale, unit = bytes_unit(size)
    return f"{size / scale:.0f} {unit}" if scale == 1 else f"{size / scale:.2f} {unit}"


def ms_text(milliseconds: float | None) -> str:
    """Format milliseconds, as in `12.3 ms`; from a million seconds on as days."""
    if milliseconds is None:
        return NO_VALUE
    if abs(milliseconds) >= 1e9:
        return f"{milliseconds / 86_400_000:,.0f} days"
    digits = 2 if abs(milliseconds) < 10 else 1 if abs(milliseconds) < 1000 else 0
    return f"{milliseconds:,.{digits}f} ms"


def seconds_text(seconds: float | None) -> str:
    """Format seconds, as in `17.4 s`; below a second as milliseconds."""
    if seconds is None or abs(seconds) < 1:
        return ms_text(seconds and seconds * 1000)
    return f"{seconds:,.{2 if abs(seconds) < 10 else 1}f} s"


def range_text(low_ms: float | None, high_ms: float | None) -> str:
    """Format a range of milliseconds, as in `12.3 to 15.8 ms`."""
    if low_ms is None or high_ms is None:
        return NO_VALUE
    return f"{ms_text(low_ms).removesuffix(' ms')} to {ms_text(high_ms)}"


def rate_text(bytes_per_s: float | None) -> str:
    """Format a rate, as in `12.3 GB/s`; units are decimal, as for links."""
    if bytes_per_s is None:
        return NO_VALUE
    for scale, unit in RATE_UNITS:
        if abs(bytes_per_s) >= _ROUNDED_UP * scale:
            return f"{bytes_per_s / scale:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def count_text(count: float | None) -> str:
    """Format a count, as in `3.83 G` and `125 M`."""
    if count is None:
        return NO_VALUE
    for scale, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= _ROUNDED_UP * scale:
            return f"{count / scale:.3g}{unit}"
    return f"{count:.3g}"


def runs_text(numbers: Iterable[int], to: str = "-") -> str:
    """Return numbers as text, those that follow each other as a range: `0, 4-7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join(to.join(map(str, run)) for run in runs)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, as in `1 finding` and `2 findings`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
