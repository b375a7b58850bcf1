"""Reading the values that people type."""

from __future__ import annotations

import re
from typing import Annotated

import typer

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def size(text: str) -> int:
    """`500MB`, `2GiB`, `1e9` in bytes. Raises BadParameter for anything else."""
    match = _SIZE.fullmatch(text)
    try:
        number, unit, binary = match.groups() if match else ("", "", "")
        scale = 1024 ** " KMGT".index(unit.upper()) if binary and unit else _UNITS[unit.upper()]
        value = int(float(number) * scale)
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise typer.BadParameter(f"{text!r} is not a size: write it like 500MB, 2GiB or 1e9")
    return value


def count(text: str) -> int:
    """`12` or `5e8`. Raises BadParameter for what is not a whole number from 0."""
    try:
        value = float(text)
        whole = int(value)
    except (ValueError, OverflowError):
        value, whole = 0.5, 0
    if value != whole or whole < 0:
        raise typer.BadParameter(f"{text!r} is not a count: write a whole number, like 12 or 5e8")
    return whole


def iterations(text: str) -> tuple[int, int | None]:
    """`3:6` (3, 4 and 5), `3:`, `:6` or `3`, as (first, end). Raises BadParameter for anything else."""
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None or text.strip() in ("", ":"):
        raise typer.BadParameter(f"{text!r} is not a range of iterations: write it like 3:6, 3: or :6")
    start, colon, end = match.groups()
    first = int(start or 0)
    last = first + 1 if not colon else int(end) if end else None
    if last is not None and last <= first:
        raise typer.BadParameter(f"{text!r} has no iterations in it: the second number is where it ends")
    return first, last


Rank = Annotated[
    int | None,
    typer.Option("--rank", help="Only this rank.", parser=count, metavar="N", show_default="the first; all in --json"),
]
