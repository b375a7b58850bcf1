"""The program that opens memory snapshots: a pickle comes in by stdin, columns of numbers go out by stdout.

An unpickler that refuses every class keeps a pickle from running anything, but not from crashing its reader (hashing
nested tuples overflows the stack), from keeping it busy for ever, or from making it take tens of GB (one huge memo
index does). So this is a process of its own, with an end to its memory and its time. It is run by its path and
isolated, so it imports nothing but the standard library.

What goes out: a line of JSON, {"error": why} or {"rows": {table: how many}}, then the columns of each table in the
order of TABLES, as native int64.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import resource
import sys
from array import array
from typing import Any, NoReturn

TABLES = {
    "events": ("device", "action", "time_us", "bytes"),
    "blocks": ("device", "state", "bytes", "requested"),
    "segments": ("device", "bytes"),
}
_ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_map", "segment_free", "segment_unmap", "oom"
)  # fmt: skip
# The numbers by which the columns `action` and `state` name them.
ACTIONS = {name: number for number, name in enumerate(_ACTIONS)}
STATES = {"inactive": 0, "active_allocated": 1, "active_awaiting_free": 2, "active_pending_free": 2}

Tables = dict[str, dict[str, "array[int]"]]

# Real snapshots take 5 to 8 times their size in memory; a pickle of nothing but empty sets takes 230 times its size.
_RATIO = 32
_FREE_BYTES = 128 << 20
# Real ones are read at 50 MB/s and more.
_BYTES_PER_S = 1_000_000


class PlainUnpickler(pickle.Unpickler):
    """Numbers, text, lists, dicts and the like; whatever would have to be looked up or called is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks to run {module[:50]}.{name[:50]}, which was refused")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it asks for an object from elsewhere, which was refused")


def tables(snapshot: object) -> Tables:
    """The numbers of a snapshot; events of unknown actions are left out. Raises for what is no snapshot."""
    if isinstance(snapshot, list):
        # All that there was before torch recorded events.
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise ValueError("it is a pickle, but no memory snapshot of torch's")
    found: Tables = {table: {column: array("q") for column in columns} for table, columns in TABLES.items()}
    events, blocks, segments = (list(columns.values()) for columns in found.values())
    for device, trace in enumerate(snapshot.get("device_traces", ())):
        for event in trace:
            action = ACTIONS.get(event["action"])
            if action is not None:
                _append(events, device, action, event["time_us"], event["size"])
    for segment in snapshot["segments"]:
        _append(segments, segment["device"], segment["total_size"])
        for block in segment["blocks"]:
            _append(blocks, segment["device"], STATES[block["state"]], block["size"], _requested(block))
    return found


def _append(columns: list[array[int]], *row: int) -> None:
    for column, value in zip(columns, row, strict=True):
        column.append(value)


def _requested(block: dict[str, Any]) -> int:
    """Torch 2.0 had the size that was asked for in the block's history."""
    history = block.get("history")
    size: int = block.get("requested_size", history[0]["real_size"] if history else block["size"])
    return size


def main(seconds: int) -> None:
    """Answer on stdout. seconds: of CPU time, beside what the size of the input allows."""
    gc.disable()
    available = _available_bytes()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, available)
    _limit(resource.RLIMIT_CPU, seconds)
    try:
        data = sys.stdin.buffer.read()
        _limit(resource.RLIMIT_AS, min(available, _used_bytes() + _FREE_BYTES + _RATIO * len(data)))
        _limit(resource.RLIMIT_CPU, seconds + len(data) // _BYTES_PER_S)
        _answer(tables(PlainUnpickler(io.BytesIO(data)).load()))
    except MemoryError:
        _fail("opening it takes more memory than it may")
    except KeyError as error:
        times = error.args == ("time_us",)
        _fail("its events have no times (torch records them since 2.2)" if times else f"it lacks {error}")
    except (AttributeError, TypeError):
        _fail("it is a pickle, but not built like a memory snapshot of torch's")
    except Exception as error:
        # Damaged bytes raise nearly anything, and whatever it is, the answer is the same.
        _fail(str(error) or type(error).__name__)
    sys.stdout.flush()
    # Taking all the objects down would take as long as building them.
    os._exit(0)


def _answer(found: Tables) -> None:
    print(json.dumps({"rows": {table: len(columns["device"]) for table, columns in found.items()}}), flush=True)
    for columns in found.values():
        for column in columns.values():
            sys.stdout.buffer.write(column)
    sys.stdout.buffer.flush()


def _fail(why: str) -> None:
    """The reason may quote the file: what a terminal would act on is taken out."""
    print(json.dumps({"error": "".join(c if c.isprintable() else "?" for c in why[:200])}))


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) << 10


if __name__ == "__main__":
    main(int(sys.argv[1]))
