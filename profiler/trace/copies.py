"""Copies between host and device, from the Chrome traces that torch's profiler writes (Kineto)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
_NAME = re.compile(r"Memcpy (HtoD|DtoH)(?: \((\w+) -> (\w+)\))?")
_DIRECTION = {"HtoD": "h2d", "DtoH": "d2h"}


def read(paths: Iterable[Path], wall_to_monotonic_ns: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the table `transfers` from these files, and a line for each that could not be read."""
    rows: list[dict[str, Any]] = []
    trouble = []
    for path in paths:
        try:
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            base = int(trace.get("baseTimeNanoseconds", 0)) + wall_to_monotonic_ns
            rows += [row for event in trace["traceEvents"] if (row := _row(event, base)) is not None]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            trouble.append(f"the copies in {path.name} could not be read ({error!r})")
    return rows, trouble


def _row(event: dict[str, Any], base_ns: int) -> dict[str, Any] | None:
    """`ts` and `dur` are microseconds, with fractions, after the base."""
    match = _NAME.match(event.get("name", "")) if event.get("cat") == "gpu_memcpy" else None
    if match is None:
        return None
    way, source, target = match.groups()
    host = source if way == "HtoD" else target
    args = event.get("args", {})
    start = base_ns + round(float(event["ts"]) * 1000)
    return {
        "start_ns": start,
        "end_ns": start + round(float(event["dur"]) * 1000),
        "device": f"cuda:{args.get('device', 0)}",
        "direction": _DIRECTION[way],
        "bytes": args.get("bytes"),
        "host_memory": host.lower() if host in ("Pinned", "Pageable") else None,
        "stream": args.get("stream"),
        "name": event["name"],
    }
