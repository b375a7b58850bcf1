"""JSON files that people write: read with care, and complained about in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbtide.errors import UserError

# A machine or workload file is far shorter than this.
_MOST_BYTES = 16 << 20


def read_object(path: Path, what: str, error: type[UserError]) -> dict[str, Any]:
    """The JSON object in a file. Raises `error` where there is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise error(f"{path} is too large for a {what} file")
        found = json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as reason:
        raise error(f"{what} file {path} cannot be read: {reason.strerror or reason}") from None
    except (ValueError, RecursionError):
        raise error(f"{what} file {path} is not JSON") from None
    if not isinstance(found, dict):
        raise error(f"{what} file {path} is not a JSON object")
    return found


def _refuse(constant: str) -> Any:
    """NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(constant)


def number(
    values: dict[str, Any], key: str, error: type[UserError], what: str, most: float = 1e18, least: float = 0.0
) -> float | None:
    """A number from `least` to `most`; None where it is missing or null. Raises `error` for anything else."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise error(f"{what}: {key} is {value!r}, which is not a number")
    # Compared before it is converted: an integer may be too long for a float.
    if not least <= value <= most:
        raise error(f"{what}: {key} is {_short(value)}; it must be from {least:g} to {most:g}")
    return float(value)


def _short(value: float) -> str:
    try:
        return f"{value:g}"
    except OverflowError:
        return "beyond all numbers"
