"""Reads the figures in the messages of out-of-memory errors."""

import re
from typing import Any

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|KiB|MiB|GiB|TiB)"
_PATTERNS = {
    "requested_bytes": rf"[Tt]ried to allocate {_SIZE}",
    "capacity_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "reserved_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}


def with_stated_figures(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's entry with the figures that its error messages state.

    Only the messages of out-of-memory errors (of torch 2 and of its CPU allocator)
    state them, in hundredths of a unit; None where they do not.
    """
    errors = entry.get("out_of_memory")
    return (
        {**entry, "out_of_memory": [_complete(error) for error in errors]}
        if errors
        else entry
    )


def _complete(record: dict[str, Any]) -> dict[str, Any]:
    text = record.get("message") or ""
    stated: dict[str, int | None] = dict.fromkeys(_PATTERNS)
    for name, pattern in _PATTERNS.items():
        if match := re.search(pattern, text):
            stated[name] = round(float(match[1]) * _UNITS[match[2]])
    allocated, unused = stated["allocated_bytes"], stated["reserved_bytes"]
    stated["reserved_bytes"] = (
        None if allocated is None or unused is None else allocated + unused
    )
    return {
        **record,
        **{name: figure for name, figure in stated.items() if record.get(name) is None},
    }
