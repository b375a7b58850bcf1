"""JSON files that people write: read with care, and complained about in one line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ebbtide.profiler.trace import UserError

# A machine or workload file is far shorter than this.
_MOST_BYTES = 16 << 20


def read_object(path: Path, what: str, error: type[UserError]) -> dict[str, Any]:
    """The JSON object in a file. Raises `error` where there is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise error(f"{path} is too large for a {what} file")
        found = json.loads(path.read_bytes())
    except OSError as reason:
        raise error(f"{what} file {path} cannot be read: {reason.strerror or reason}") from None
    except (ValueError, RecursionError):
        raise error(f"{what} file {path} is not JSON") from None
    if not isinstance(found, dict):
        raise error(f"{what} file {path} is not a JSON object")
    return found


def number(
    values: dict[str, Any], key: str, error: type[UserError], what: str, most: float = 1e18, positive: bool = False
) -> float | None:
    """A number from 0 (or above it) to `most`; None where it is missing or null. Raises `error` for anything else."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise error(f"{what}: {key} is {value!r}, which is not a number")
    if value < 0 or (positive and value == 0) or value > most:
        least = "above 0" if positive else "from 0"
        raise error(f"{what}: {key} is {value:g}; it must be {least} and at most {most:g}")
    return float(value)
