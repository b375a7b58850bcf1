"""Program that opens memory snapshots: it reads a pickle from stdin and writes columns of numbers to stdout.

An unpickler that refuses every class prevents a pickle from running code. It does not prevent a crash of the reader
(hashing nested tuples overflows the stack), endless work, or tens of GB of memory (one huge memo index is enough). So
the snapshot is opened in a process of its own with limits on memory and time. The program is run by its path and in
isolated mode, so it imports only the standard library.

Output: one line of JSON, {"error": reason} or {"rows": {table: number of rows}, "stacks", "annotations"}, then the
columns of each table in the order of TABLES as native int64. The column `stack` is a position in `stacks`, or -1.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import re
import resource
import sys
from array import array
from typing import Any, NoReturn

TABLES = {
    "events": ("device", "action", "time_us", "bytes", "address", "stack"),
    "blocks": ("device", "state", "bytes", "requested", "address", "stack", "segment"),
    "segments": ("device", "bytes", "pool"),
}
_ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_map", "segment_free", "segment_unmap", "oom"
)  # fmt: skip
# The codes in the columns `action` and `state`.
ACTIONS = {name: number for number, name in enumerate(_ACTIONS)}
STATES = {"inactive": 0, "active_allocated": 1, "active_awaiting_free": 2, "active_pending_free": 2}

# The innermost frames of a stack that are kept, and the text of all stacks together.
_MAX_FRAMES, _MAX_LINE_CHARS, _MAX_STACK_CHARS = 100, 300, 64 << 20
_MAX_ANNOTATIONS = 100_000
# The first line of stacks in a thread of the autograd engine, which has no Python frames outside the engine.
ENGINE = "autograd engine"
_ENGINE_PREFIX = "torch::autograd::Engine::"
# The last line of stacks that allocate a workspace of cuBLAS, which is kept for later calls.
WORKSPACE = "cuBLAS workspace"
_WORKSPACE_CALL = re.compile(r"at::cuda::getNewWorkspace\(|at::cuda::getCUDABlasLtWorkspace")
# torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor, ...
_NODE = re.compile(r"torch::autograd::(?:\w+::)*(\w+)::apply\(")

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


class StackTable:
    """The different call stacks of a snapshot as text, outermost frame first."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        # By identity: events of one place share a list. The snapshot keeps all of them alive.
        self._by_identity: dict[int, int] = {}
        self._chars = 0

    def number(self, frames: list[dict[str, Any]] | None) -> int:
        """Return the position of a stack in `texts`; -1 for one without frames, or where there are too many."""
        if not frames:
            return -1
        number = self._by_identity.get(id(frames))
        if number is None:
            number = self._by_identity[id(frames)] = self._add(_stack_text(frames))
        return number

    def _add(self, text: str) -> int:
        if text in self._numbers:
            return self._numbers[text]
        if not text or self._chars + len(text) > _MAX_STACK_CHARS:
            return -1
        self._chars += len(text)
        self._numbers[text] = len(self.texts)
        self.texts.append(text)
        return self._numbers[text]


def _stack_text(frames: list[dict[str, Any]]) -> str:
    """Return the Python frames of a stack, one per line as `function (file:line)`; of C++ frames only the backward."""
    # Innermost frame first, as in the snapshot.
    lines: list[str] = []
    engine, node, workspace = False, None, False
    for frame in frames:
        name, file = frame["name"], frame["filename"]
        if file.endswith(".py") or file.startswith("<"):
            if len(lines) < _MAX_FRAMES:
                lines.append(_printable(f"{name} ({file}:{frame['line']})", _MAX_LINE_CHARS))
        elif name.startswith(_ENGINE_PREFIX):
            engine = True
        elif node is None and "::apply(" in name and (match := _NODE.match(name)):
            node = match[1]
        elif _WORKSPACE_CALL.match(name):
            workspace = True
    if engine:
        # Frames of a node in Python (a checkpoint that computes again) are inside the node.
        lines += [node, ENGINE] if node else [ENGINE]
    if workspace:
        lines.insert(0, WORKSPACE)
    return "\n".join(reversed(lines))


def snapshot_columns(snapshot: object, stacks: StackTable) -> SnapshotColumns:
    """Extract the numbers of a snapshot, without events of unknown actions, and add its stacks to `stacks`.

    Any kind of exception is raised if the object is not a snapshot.
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
                stack = stacks.number(event.get("frames"))
                _append(events, device, action, event["time_us"], event["size"], event.get("addr", 0), stack)
    for number, segment in enumerate(snapshot["segments"]):
        private = any(segment.get("segment_pool_id", ()))
        _append(segments, segment["device"], segment["total_size"], private)
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            stack = stacks.number(_frames(block))
            sizes = block["size"], _requested_bytes(block)
            _append(blocks, segment["device"], STATES[block["state"]], *sizes, address, stack, number)
            address += block["size"]
    return tables


def annotation_rows(snapshot: object) -> list[tuple[str, str, int, int]]:
    """Return the annotations of a snapshot as (name, START or END, device, time in us), in order."""
    entries = snapshot.get("external_annotations", ()) if isinstance(snapshot, dict) else ()
    return [
        (
            _printable(str(entry["name"]), _MAX_LINE_CHARS),
            str(entry["stage"]),
            int(entry["device"]),
            int(entry["time_us"]),
        )
        for entry in entries[:_MAX_ANNOTATIONS]
    ]


def _append(columns: list[array[int]], *row: int) -> None:
    for column, value in zip(columns, row, strict=True):
        column.append(value)


def _frames(block: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the stack that allocated a block; torch 2.0 has it in the block's history."""
    history = block.get("history")
    frames: list[dict[str, Any]] | None = block.get("frames") or (history[0].get("frames") if history else None)
    return frames


def _requested_bytes(block: dict[str, Any]) -> int:
    """Return the requested size of a block, which torch 2.0 keeps in the block's history."""
    history = block.get("history")
    size: int = block.get("requested_size", history[0]["real_size"] if history else block["size"])
    return size


def main(seconds: int) -> None:
    """Read a snapshot from stdin and answer on stdout.

    `seconds`: CPU time allowed in addition to the time that the size of the input allows.
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
        snapshot, stacks = PlainUnpickler(io.BytesIO(data)).load(), StackTable()
        _write_tables(
            snapshot_columns(snapshot, stacks), {"stacks": stacks.texts, "annotations": annotation_rows(snapshot)}
        )
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


def _write_tables(tables: SnapshotColumns, texts: dict[str, Any]) -> None:
    rows = {table: len(columns["device"]) for table, columns in tables.items()}
    print(json.dumps({"rows": rows, **texts}), flush=True)
    for columns in tables.values():
        for column in columns.values():
            sys.stdout.buffer.write(column)
    sys.stdout.buffer.flush()


def _write_error(reason: str) -> None:
    print(json.dumps({"error": _printable(reason, _MAX_REASON_CHARS)}))


def _printable(text: str, max_chars: int) -> str:
    """Return text of the file without control characters, on which a terminal would act."""
    text = text[:max_chars]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


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
