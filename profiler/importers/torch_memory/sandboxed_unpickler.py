"""Program that opens memory snapshots: it reads a pickle from stdin and writes columns of numbers to stdout.

An unpickler that refuses every class prevents a pickle from running code. It does not prevent a crash of the reader
(hashing nested tuples overflows the stack), endless work, or tens of GB of memory (one huge memo index is enough). So
the snapshot is opened in a process of its own with limits on memory and time. The program is run by its path and in
isolated mode, so it imports only the standard library.

Output: one line of JSON, {"error": reason} or {"rows": {table: number of rows}}, then the columns of each table in the
order of TABLES as native int64.
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
# The codes in the columns `action` and `state`.
ACTIONS = {name: number for number, name in enumerate(_ACTIONS)}
STATES = {"inactive": 0, "active_allocated": 1, "active_awaiting_free": 2, "active_pending_free": 2}

SnapshotColumns = dict[str, dict[str, "array[int]"]]

# Real snapshots need 5 to 8 times their size in memory; a pickle of empty sets needs 230 times its size.
_MEMORY_RATIO = 32
_BASE_MEMORY_BYTES = 128 << 20
# Real snapshots are read at 50 MB/s and more.
_MIN_BYTES_PER_S = 1_000_000
_MAX_REASON_CHARS = 200


class PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, text, lists, dicts and similar. It refuses everything that must be imported or called."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks to run {module[:50]}.{name[:50]}, which was refused")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file, which was refused")


def snapshot_columns(snapshot: object) -> SnapshotColumns:
    """Extract the numbers of a snapshot, without events of unknown actions.

    Raises:
        Exception: Any kind of exception, if the object is not a snapshot.
    """
    if isinstance(snapshot, list):
        # The format before torch recorded events.
        snapshot = {"segments": snapshot}
    if not isinstance(snapshot, dict) or "segments" not in snapshot:
        raise ValueError("it is a pickle, but not a memory snapshot of torch")
    tables: SnapshotColumns = {table: {column: array("q") for column in columns} for table, columns in TABLES.items()}
    events, blocks, segments = (list(columns.values()) for columns in tables.values())
    for device, trace in enumerate(snapshot.get("device_traces", ())):
        for event in trace:
            action = ACTIONS.get(event["action"])
            if action is not None:
                _append(events, device, action, event["time_us"], event["size"])
    for segment in snapshot["segments"]:
        _append(segments, segment["device"], segment["total_size"])
        for block in segment["blocks"]:
            _append(blocks, segment["device"], STATES[block["state"]], block["size"], _requested_bytes(block))
    return tables


def _append(columns: list[array[int]], *row: int) -> None:
    for column, value in zip(columns, row, strict=True):
        column.append(value)


def _requested_bytes(block: dict[str, Any]) -> int:
    """Return the requested size of a block, which torch 2.0 keeps in the block's history."""
    history = block.get("history")
    size: int = block.get("requested_size", history[0]["real_size"] if history else block["size"])
    return size


def main(seconds: int) -> None:
    """Read a snapshot from stdin and answer on stdout.

    Args:
        seconds: CPU time allowed in addition to the time that the size of the input allows.
    """
    gc.disable()
    available = _available_bytes()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, available)
    _limit(resource.RLIMIT_CPU, seconds)
    try:
        data = sys.stdin.buffer.read()
        _limit(resource.RLIMIT_AS, min(available, _used_bytes() + _BASE_MEMORY_BYTES + _MEMORY_RATIO * len(data)))
        _limit(resource.RLIMIT_CPU, seconds + len(data) // _MIN_BYTES_PER_S)
        _write_tables(snapshot_columns(PlainUnpickler(io.BytesIO(data)).load()))
    except MemoryError:
        _write_error("opening it takes more memory than allowed")
    except KeyError as error:
        no_times = error.args == ("time_us",)
        _write_error("its events have no times (torch records them since 2.2)" if no_times else f"it lacks {error}")
    except (AttributeError, TypeError):
        _write_error("it is a pickle, but does not have the structure of a torch memory snapshot")
    except Exception as error:
        # Damaged bytes raise nearly any exception, and all of them get the same answer.
        _write_error(str(error) or type(error).__name__)
    sys.stdout.flush()
    # A normal exit would free all objects, which takes as long as building them.
    os._exit(0)


def _write_tables(tables: SnapshotColumns) -> None:
    print(json.dumps({"rows": {table: len(columns["device"]) for table, columns in tables.items()}}), flush=True)
    for columns in tables.values():
        for column in columns.values():
            sys.stdout.buffer.write(column)
    sys.stdout.buffer.flush()


def _write_error(reason: str) -> None:
    """Write the reason without control characters: it may quote the file, and a terminal would act on them."""
    print(json.dumps({"error": "".join(c if c.isprintable() else "?" for c in reason[:_MAX_REASON_CHARS])}))


def _limit(kind: int, limit: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) << 10


if __name__ == "__main__":
    main(int(sys.argv[1]))
