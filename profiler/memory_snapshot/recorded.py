"""Reads the allocations that a recorded job captured, and adds what the job knew of its
blocks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.events import MISSING, Event, IntArray, spans
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.memory_snapshot.allocations import allocation_rows, pool_rows
from ebbtide.profiler.memory_snapshot.reader import SnapshotError, read_snapshot
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ENGINE

_NEVER = np.iinfo(np.int64).max
_OWNER_COLUMNS = ["address", "bytes", "category", "module"]
_CPU = 0
_MEMORY = "[memory]"
_PYTHON = "python_function"
# `model.py(12): forward`; other names belong to built-in functions, and to modules.
_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
# The evaluation of a node by the autograd engine.
_NODE = "autograd::engine::evaluate_function: "


def read_recorded(description_file: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the two files of an allocation capture, in times of the monotonic clock.

    Returns rows of the tables `allocations` and `memory`: pools `requested` and
    `reserved` on CUDA, `tensors` on the CPU."""
    description: dict[str, Any] = json.loads(description_file.read_bytes())
    path = description_file.with_name(Path(description["file"]).name)
    shift_ns, device = (
        int(description["wall_to_monotonic_ns"]),
        str(description["device"]),
    )
    owners = [
        (int(t_ns), pd.DataFrame(blocks, columns=_OWNER_COLUMNS))
        for t_ns, blocks in description["owners"]
    ]
    if path.suffix == ".json":
        rows = _profiled_rows(path, shift_ns, owners)
        memory = _timeline(rows).assign(pool="tensors")
    else:
        number = int(device.rpartition(":")[2])
        try:
            snapshot = read_snapshot(lambda: path.open("rb"))
        except SnapshotError as error:
            raise ValueError(str(error)) from None
        rows = allocation_rows(snapshot, number, snapshot.span_ns[0])
        memory = pool_rows(snapshot, number)
        for table, columns in ((rows, ("start_ns", "end_ns")), (memory, ("t_ns",))):
            for column in columns:
                table[column] += shift_ns
    rows = _with_owners(rows, owners)
    rows["module"] = rows["module"].where(
        rows["module"].notna(), _modules(rows, description["calls"])
    )
    return rows.drop(columns="address").assign(device=device), memory.assign(
        device=device
    )


def _profiled_rows(
    path: Path, shift_ns: int, owners: list[tuple[int, pd.DataFrame]]
) -> pd.DataFrame:
    """Return the blocks of the CPU: allocated in the profile, or older and owned by the
    job when it began."""
    events = profiled_events(path)
    events["t_ns"] += shift_ns
    end_ns = events.groupby("address")["t_ns"].shift(-1, fill_value=_NEVER)
    made = (
        events[events["bytes"] > 0]
        .assign(end_ns=end_ns)
        .rename(columns={"t_ns": "start_ns"})
    )
    start_ns = owners[0][0]
    older = owners[0][1].assign(start_ns=start_ns, stack=None)
    older["end_ns"] = [
        _last_owned(address, made, owners) for address in older["address"]
    ]
    columns = ["start_ns", "end_ns", "bytes", "address", "stack"]
    rows = pd.concat(
        [older[columns], made[columns].astype({"stack": object})], ignore_index=True
    )
    rows["end_ns"] = rows["end_ns"].astype("Int64").mask(rows["end_ns"] == _NEVER)
    return rows.astype({"start_ns": "int64", "bytes": "int64", "stack": "category"})


def _last_owned(
    address: int, made: pd.DataFrame, owners: list[tuple[int, pd.DataFrame]]
) -> int:
    """Return when a block that is older than the profile was seen last; `_NEVER` if it
    was there at the end.

    Its release is not in the profile. It was released before another block was
    allocated at its address.
    """
    again = made.loc[made["address"] == address, "start_ns"]
    limit = int(again.min()) if len(again) else _NEVER
    seen = owners[0][0]
    for t_ns, blocks in owners:
        if t_ns >= limit or not (blocks["address"] == address).any():
            return seen
        seen = t_ns
    return _NEVER


def _with_owners(
    rows: pd.DataFrame, owners: list[tuple[int, pd.DataFrame]]
) -> pd.DataFrame:
    """Add category and module of the blocks that the job owned, matched by address at a
    time when the block was there."""
    category = np.full(len(rows), None, dtype=object)
    module = np.full(len(rows), None, dtype=object)
    ends = rows["end_ns"].fillna(_NEVER).to_numpy(np.int64)
    starts, addresses = rows["start_ns"].to_numpy(np.int64), rows["address"].to_numpy()
    for t_ns, blocks in owners:
        by_address = blocks.drop_duplicates("address").set_index("address")
        live = np.flatnonzero(
            (starts <= t_ns) & (ends > t_ns) & np.isin(addresses, by_address.index)
        )
        entries = by_address.loc[addresses[live]]
        category[live], module[live] = (
            entries["category"].to_numpy(),
            entries["module"].to_numpy(),
        )
    return rows.assign(
        category=pd.Series(category, dtype=object),
        module=pd.Series(module, dtype=object),
    )


def _modules(rows: pd.DataFrame, calls: list[tuple[int, str | None]]) -> pd.Series:
    """Return the innermost module whose forward ran when each block was allocated.

    The module is None outside of modules.
    """
    times, innermost = [], []
    stack: list[str | None] = []
    for t_ns, name in calls:
        if name is not None:
            stack.append(name)
        elif stack:
            stack.pop()
        times.append(t_ns)
        innermost.append(stack[-1] if stack else None)
    position = np.searchsorted(
        np.array(times, np.int64), rows["start_ns"].to_numpy(np.int64), side="right"
    )
    return pd.Series(
        np.array([None, *innermost], dtype=object)[position],
        index=rows.index,
        dtype=object,
    )


def _timeline(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the sum of the blocks over time."""
    released = rows[rows["end_ns"].notna()]
    times = np.concatenate([rows["start_ns"], released["end_ns"].to_numpy(np.int64)])
    changes = np.concatenate([rows["bytes"], -released["bytes"]])
    order = np.argsort(times, kind="stable")
    times, sizes = times[order], changes[order].cumsum()
    last = np.append(times[1:] != times[:-1], True)[: len(times)]
    return pd.DataFrame({"t_ns": times[last], "bytes": sizes[last]})


def profiled_events(path: Path) -> pd.DataFrame:
    """Read allocations and releases of the CPU from a `profile_memory=True` trace.

    Releases of blocks that are older than the profile are not in it.

    Returns:
        Columns t_ns (Unix time), bytes (negative: a release), address, and stack
            (outermost frame first, each as
        `function (file:line)` with the line where the function begins; missing where
            `with_stack` was off), by time.
    """
    changes: list[Event] = []
    calls: list[Event] = []
    with path.open("rb") as file:
        trace = ChromeTrace(file)
        for batch in trace.batches():
            for event in batch:
                if event.ts is UNSET:
                    continue
                if event.name == _MEMORY:
                    if event.args.device_type == _CPU and event.args.address != MISSING:
                        changes.append(event)
                elif event.cat == _PYTHON or event.name.startswith(_NODE):
                    calls.append(event)
    t_ns = spans(changes)[0] + trace.base_ns if changes else np.empty(0, np.int64)
    order = np.argsort(t_ns, kind="stable")
    stacks = _stacks([changes[n] for n in order], t_ns[order] - trace.base_ns, calls)
    return pd.DataFrame(
        {
            "t_ns": t_ns[order],
            "bytes": np.array([event.args.size for event in changes], np.int64)[order],
            "address": np.array([event.args.address for event in changes], np.int64)[
                order
            ],
            "stack": pd.Categorical([*stacks]),
        }
    )


def _stacks(
    changes: list[Event], times: IntArray, calls: list[Event]
) -> Iterator[str | None]:
    """Yield the stack of each change, in order.

    A stack is the calls of the change's thread that are open at its time.
    """
    starts, ends = (
        spans(calls) if calls else (np.empty(0, np.int64), np.empty(0, np.int64))
    )
    # Of calls that begin at once, the longest contains the others.
    order = np.lexsort((-ends, starts)).tolist()
    begins, finishes = starts.tolist(), ends.tolist()
    open_calls: dict[object, list[tuple[int, str]]] = {}
    texts: dict[tuple[str, ...], str | None] = {}
    position = 0
    for change, now in zip(changes, times.tolist(), strict=True):
        while position < len(order) and begins[order[position]] <= now:
            number = order[position]
            position += 1
            line = _line(calls[number])
            if line is not None:
                stack = open_calls.setdefault(calls[number].tid, [])
                _close(stack, begins[number])
                stack.append((finishes[number], line))
        stack = open_calls.get(change.tid, [])
        _close(stack, now)
        key = tuple(line for _, line in stack)
        if key not in texts:
            texts[key] = _text(key)
        yield texts[key]


def _close(stack: list[tuple[int, str]], now: int) -> None:
    """Remove the calls that have ended."""
    while stack and stack[-1][0] <= now:
        stack.pop()


def _line(call: Event) -> str | None:
    """Return the line of a call in a stack; None for one that is left out."""
    if call.name.startswith(_NODE):
        return call.name
    match = _FRAME.match(call.name)
    return f"{match['function']} ({match['file']}:{match['line']})" if match else None


def _text(lines: tuple[str, ...]) -> str | None:
    """Return a stack as text.

    Of a stack in the backward, this is what the engine evaluates and what is inside of
    that.
    """
    nodes = [number for number, line in enumerate(lines) if line.startswith(_NODE)]
    if nodes:
        node = lines[nodes[-1]].removeprefix(_NODE)
        return "\n".join([ENGINE, node, *lines[nodes[-1] + 1 :]])
    return "\n".join(lines) or None
