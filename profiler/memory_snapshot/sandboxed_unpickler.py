"""Program that reads a pickle of a memory snapshot from stdin, and writes columns of
numbers to stdout.

No class of a pickle is called, so none can run code. That does not prevent endless
work, or tens of GB of memory. So the snapshot is read in a process of its own with
limits on memory and time. It imports only the standard library.

Output: the events in blocks of ROWS, each as its columns EVENT_COLUMNS, the last one
filled up; the columns of the other TABLES as native int64; JSON, {"error": reason} or
{"rows": {table: number of rows}, "device_events": number of events of each device,
"stacks", "annotations"}; and its length in 8 bytes. The column `stack` is a position in
`stacks`, or -1. Events of unknown actions have the action -1, those without a time the
time -1.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from array import array
from typing import Any

from ebbtide.profiler.memory_snapshot.event_stream import EVENT, SnapshotPickle

# Rows of a block of events, and the type codes of their columns.
ROWS = 1 << 16
EVENT_COLUMNS = {
    "action": "b",
    "time_us": "q",
    "bytes": "q",
    "address": "q",
    "stack": "i",
}
TABLES = {
    "blocks": ("device", "state", "bytes", "requested", "address", "stack", "segment"),
    "segments": ("device", "bytes", "pool"),
}
_ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_map",
    "segment_free", "segment_unmap", "oom"
)  # fmt: skip
# The codes in the columns `action` and `state`.
ACTIONS = {name: number for number, name in enumerate(_ACTIONS)}
STATES = {
    "inactive": 0,
    "active_allocated": 1,
    "active_awaiting_free": 2,
    "active_pending_free": 2,
}

# The innermost frames of a stack that are kept, and the text of all stacks together.
_MAX_FRAMES, _MAX_LINE_CHARS, _MAX_STACK_CHARS = 100, 300, 64 << 20
_MAX_ANNOTATIONS = 100_000
# The first line of stacks in a thread of the autograd engine, which has no Python
# frames outside the engine.
ENGINE = "autograd engine"
_ENGINE_PREFIX = "torch::autograd::Engine::"
# The last line of stacks that allocate a workspace of cuBLAS, which is kept for later
# calls.
WORKSPACE = "cuBLAS workspace"
_WORKSPACE_CALL = re.compile(
    r"at::cuda::getNewWorkspace\(|at::cuda::getCUDABlasLtWorkspace"
)
# torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor, ...
_NODE = re.compile(r"torch::autograd::(?:\w+::)*(\w+)::apply\(")

Columns = dict[str, "array[int]"]

# A file of events needs a fifth of its size, one of segments and new frames up to ten
# times.
_MEMORY_RATIO = 16
_BASE_MEMORY_BYTES = 128 << 20
# Real snapshots are read at 30 MB/s and more.
_MIN_BYTES_PER_S = 1_000_000
_MAX_REASON_CHARS = 200


class StackTable:
    """The different call stacks of a snapshot as text, outermost frame first."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        # By identity: events of one place share a list. The snapshot keeps all of them
        # alive.
        self._by_identity: dict[int, int] = {}
        self._chars = 0

    def number(self, frames: list[dict[str, Any]] | None) -> int:
        """Return the position of a stack in `texts`.

        Return -1 for one without frames, or where there are too many.
        """
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
    """Return the frames of a stack, one per line as `function (file:line)`: all Python
    frames, and of C++ frames only the backward."""
    # Innermost frame first, as in the snapshot.
    lines: list[str] = []
    engine, node, workspace = False, None, False
    for frame in frames:
        name, file = frame["name"], frame["filename"]
        if file.endswith(".py") or file.startswith("<"):
            if len(lines) < _MAX_FRAMES:
                lines.append(
                    _printable(f"{name} ({file}:{frame['line']})", _MAX_LINE_CHARS)
                )
        elif name.startswith(_ENGINE_PREFIX):
            engine = True
        elif node is None and "::apply(" in name and (match := _NODE.match(name)):
            node = match[1]
        elif _WORKSPACE_CALL.match(name):
            workspace = True
    if engine:
        # Frames of a node in Python (a checkpoint that computes again) are inside the
        # node.
        lines += [node, ENGINE] if node else [ENGINE]
    if workspace:
        lines.insert(0, WORKSPACE)
    return "\n".join(reversed(lines))


class EventBlocks:
    """Columns of events, which are written when they fill a block."""

    def __init__(self) -> None:
        self.columns: Columns = {
            name: array(code) for name, code in EVENT_COLUMNS.items()
        }
        self.rows = 0

    def write_full(self) -> None:
        while len(self.columns["stack"]) >= ROWS:
            self.write()

    def write(self) -> None:
        """Write a block. The last one is filled up with zeros."""
        rows = min(len(self.columns["stack"]), ROWS)
        self.rows += rows
        for column in self.columns.values():
            sys.stdout.buffer.write(column[:ROWS])
            sys.stdout.buffer.write(bytes((ROWS - rows) * column.itemsize))
            del column[:ROWS]


def device_events(snapshot: dict[str, Any]) -> list[int]:
    """Return the number of events of each device. The events themselves were taken out
    in this order."""
    traces = snapshot.get("device_traces", ())
    if len({id(trace) for trace in traces}) < len(traces):
        raise ValueError("two devices have the same list of events")
    if any(event is not EVENT for trace in traces for event in trace):
        raise TypeError("not an event")
    return [len(trace) for trace in traces]


def block_columns(snapshot: dict[str, Any], stacks: StackTable) -> dict[str, Columns]:
    """Return a snapshot's blocks and segments, and add their stacks to `stacks`."""
    tables = {
        table: {column: array("q") for column in columns}
        for table, columns in TABLES.items()
    }
    blocks, segments = (list(columns.values()) for columns in tables.values())
    for number, segment in enumerate(snapshot["segments"]):
        private = any(segment.get("segment_pool_id", ()))
        _append(segments, segment["device"], segment["total_size"], private)
        address = segment.get("address", 0)
        for block in segment["blocks"]:
            stack = stacks.number(_frames(block))
            sizes = block["size"], _requested_bytes(block)
            _append(
                blocks,
                segment["device"],
                STATES[block["state"]],
                *sizes,
                address,
                stack,
                number,
            )
            address += block["size"]
    return tables


def annotation_rows(snapshot: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """Return the annotations of a snapshot in order.

    Each is (name, START or END, device, time in us).
    """
    entries = snapshot.get("external_annotations", ())
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
    """Return the stack that allocated a block.

    Torch 2.0 has it in the block's history.
    """
    history = block.get("history")
    frames: list[dict[str, Any]] | None = block.get("frames") or (
        history[0].get("frames") if history else None
    )
    return frames


def _requested_bytes(block: dict[str, Any]) -> int:
    """Return the requested size of a block.

    Torch 2.0 keeps it in the block's history.
    """
    history = block.get("history")
    size: int = block.get(
        "requested_size", history[0]["real_size"] if history else block["size"]
    )
    return size


def main(seconds: int) -> None:
    """Read a snapshot from stdin and answer on stdout.

    `seconds`: CPU time allowed in addition to the time that the size of the input
    allows."""
    import resource

    gc.disable()
    available, used = _available_bytes(), _used_bytes()
    _limit(resource.RLIMIT_CORE, 0)

    def limit(read_bytes: int) -> None:
        _limit(
            resource.RLIMIT_AS,
            min(available, used + _BASE_MEMORY_BYTES + _MEMORY_RATIO * read_bytes),
        )
        _limit(resource.RLIMIT_CPU, seconds + read_bytes // _MIN_BYTES_PER_S)

    limit(0)
    try:
        events, stacks = EventBlocks(), StackTable()
        reader = SnapshotPickle(
            sys.stdin.buffer,
            limit,
            ACTIONS,
            stacks.number,
            events.columns,
            events.write_full,
        )
        snapshot = _snapshot(reader.load())
        counts, tables = device_events(snapshot), block_columns(snapshot, stacks)
        annotations = annotation_rows(snapshot)
        if events.columns["stack"]:
            events.write()
        if sum(counts) != events.rows:
            raise ValueError("it has events that no device has")
        for columns in tables.values():
            for column in columns.values():
                sys.stdout.buffer.write(column)
        rows = {table: len(columns["device"]) for table, columns in tables.items()}
        _write_head(
            rows=rows,
            device_events=counts,
            stacks=stacks.texts,
            annotations=annotations,
        )
    except MemoryError:
        _write_error("opening it takes more memory than allowed")
    except KeyError as error:
        _write_error(f"it lacks {error}")
    except (AttributeError, IndexError, TypeError, UnicodeError):
        _write_error(
            "it is a pickle, but does not have the structure of a torch memory snapshot"
        )
    except Exception as error:
        # Damaged bytes raise nearly any exception, and all of them get the same answer.
        _write_error(str(error) or type(error).__name__)
    sys.stdout.buffer.flush()
    # A normal exit would free all objects, which takes as long as building them.
    os._exit(0)


def _snapshot(value: object) -> dict[str, Any]:
    if isinstance(value, list):
        # The format before torch recorded events.
        value = {"segments": value}
    if not isinstance(value, dict) or "segments" not in value:
        raise ValueError("it is a pickle, but not a memory snapshot of torch")
    return value


def _write_head(**head: Any) -> None:
    line = json.dumps(head).encode()
    sys.stdout.buffer.write(line + len(line).to_bytes(8, "little"))


def _write_error(reason: str) -> None:
    _write_head(error=_printable(reason, _MAX_REASON_CHARS))


def _printable(text: str, max_chars: int) -> str:
    """Return text of the file without control characters.

    A terminal would act on them.
    """
    text = text[:max_chars]
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "?" for c in text)
    )


def _limit(kind: int, limit: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(
        kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return (
            next(
                int(line.split()[1])
                for line in file
                if line.startswith("MemAvailable:")
            )
            << 10
        )
