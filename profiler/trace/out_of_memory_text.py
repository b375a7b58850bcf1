"""Reads the figures that the texts of out-of-memory errors state."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB)"
_PATTERNS = {
    "requested_bytes": (rf"[Tt]ried to allocate {_SIZE}",),
    "capacity_bytes": (rf"total capacity of {_SIZE}", rf"{_SIZE} total capacity"),
    "free_bytes": (rf"of which {_SIZE} is free", rf"{_SIZE} free"),
    "allocated_bytes": (rf"{_SIZE} is allocated by PyTorch", rf"{_SIZE} already allocated"),
    "_unused_bytes": (rf"{_SIZE} is reserved by PyTorch but unallocated",),
    "reserved_bytes": (rf"{_SIZE} reserved in total by PyTorch",),
}
_FIGURES = tuple(name for name in _PATTERNS if not name.startswith("_"))


def with_stated_figures(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of a rank whose out-of-memory errors have the figures that only their messages state.

    The texts are those of torch from version 1.13 on, and of its CPU allocator. They round to hundredths of a unit. A
    figure that is not stated either is None.
    """
    errors = entry.get("out_of_memory")
    return {**entry, "out_of_memory": [_complete(error) for error in errors]} if errors else entry


def _complete(record: dict[str, Any]) -> dict[str, Any]:
    stated = _figures(record.get("message") or "")
    return {**record, **{name: record.get(name) if record.get(name) is not None else stated[name] for name in _FIGURES}}


def _figures(text: str) -> dict[str, int | None]:
    figures = {name: _first_size(text, patterns) for name, patterns in _PATTERNS.items()}
    allocated, unused = figures["allocated_bytes"], figures.pop("_unused_bytes")
    if allocated is not None and unused is not None:
        figures["reserved_bytes"] = allocated + unused
    return figures


def _first_size(text: str, patterns: tuple[str, ...]) -> int | None:
    for pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return round(float(match[1]) * _UNITS[match[2]])
    return None
