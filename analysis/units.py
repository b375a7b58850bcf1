"""Quantities as text. GB is 1e9, GiB is 2**30; what is not known is a dash."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_unit(largest: float) -> tuple[float, str]:
    """(bytes in one unit, its name) of the unit in which `largest` bytes read best."""
    power = 0
    while power + 1 < len(_UNITS) and abs(largest) >= 1024 ** (power + 1):
        power += 1
    return 1024.0**power, _UNITS[power]


def bytes_text(size: float | None) -> str:
    """`1.50 GiB`."""
    if size is None:
        return "-"
    scale, unit = bytes_unit(size)
    return f"{size / scale:.0f} {unit}" if scale == 1 else f"{size / scale:.2f} {unit}"


def ms_text(milliseconds: float | None) -> str:
    """`12.3 ms`."""
    if milliseconds is None:
        return "-"
    digits = 2 if abs(milliseconds) < 10 else 1 if abs(milliseconds) < 1000 else 0
    return f"{milliseconds:,.{digits}f} ms"
