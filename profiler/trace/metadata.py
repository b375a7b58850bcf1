"""Reading and checking the meta.json of a trace."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ebbtide.errors import TraceError
from ebbtide.profiler.trace.files import META
from ebbtide.profiler.trace.schema import FORMAT, SCHEMA

_INT = (int, type(None))
_DICT = (dict, type(None))
# What readers rely on, where it is there at all.
_KINDS: dict[str, Any] = {
    "notes": list,
    "warmup_iterations": _INT,
    "host": dict,
    "options": dict,
    "clock": dict,
    "deepspeed": _DICT,
}
_RANK_KINDS: dict[str, Any] = {
    "rank": int,
    "devices": list,
    "first_iteration_start_ns": _INT,
    "model": _DICT,
    "optimizers": (list, type(None)),
    "threads": _DICT,
}
_DEVICE_KINDS: dict[str, Any] = {"device": str, "capacity_bytes": _INT, "link": (dict, type(None))}


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of the trace at `path`. Raises TraceError for what is not a trace, is damaged, or is newer."""
    if not os.path.exists(path):
        raise TraceError(f"{path} does not exist: name a trace that `ebbtide profile` has written")
    try:
        meta = json.loads((path / META).read_bytes())
    except (OSError, RecursionError):
        raise TraceError(f"{path} is not a trace: it has no readable {META}") from None
    except ValueError:
        raise TraceError(f"{path} is damaged: its {META} is not JSON (truncated?)") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not isinstance(meta.get("schema"), int):
        raise TraceError(f"{path} is not a trace: its {META} does not say {FORMAT}")
    if meta["schema"] > SCHEMA:
        raise TraceError(
            f"{path} has trace schema {meta['schema']}, and this ebbtide reads up to {SCHEMA}: upgrade ebbtide"
        )
    odd = _odd(meta)
    if odd is not None:
        raise TraceError(f"{path} is damaged: {odd} in its {META} is not what it should be")
    return meta


def _odd(meta: dict[str, Any]) -> str | None:
    """The first value that is not of its kind."""
    if meta.get("state") == "recording" and not isinstance(meta.get("host"), dict):
        return "host"
    if isinstance(warmup := meta.get("warmup_iterations"), int) and warmup < 0:
        return "warmup_iterations"
    options = meta.get("options")
    span = options.get("iterations") if isinstance(options, dict) else None
    if span is not None and not (isinstance(span, list) and len(span) == 2 and all(isinstance(i, _INT) for i in span)):
        return "options.iterations"
    ranks = meta.get("ranks")
    if not isinstance(ranks, list):
        return "ranks"
    pieces = [("", meta, _KINDS)]
    for number, entry in enumerate(ranks):
        if not isinstance(entry, dict) or "rank" not in entry:
            return f"ranks[{number}]"
        pieces.append((f"ranks[{number}].", entry, _RANK_KINDS))
        optimizers = entry.get("optimizers")
        if isinstance(optimizers, list) and not all(isinstance(optimizer, dict) for optimizer in optimizers):
            return f"ranks[{number}].optimizers"
        devices = entry.get("devices")
        for place, device in enumerate(devices if isinstance(devices, list) else ()):
            name = f"ranks[{number}].devices[{place}]"
            if not isinstance(device, dict):
                return name
            pieces.append((f"{name}.", device, _DEVICE_KINDS))
    for where, values, kinds in pieces:
        for key, kind in kinds.items():
            if key in values and not isinstance(values[key], kind):
                return where + key
    return None
