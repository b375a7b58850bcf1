"""Allocations of the CPU from a Chrome trace of torch's profiler, with call stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from msgspec import UNSET

from ebbtide.profiler.chrome_trace.events import MISSING, Event, spans
from ebbtide.profiler.chrome_trace.int_table import IntArray
from ebbtide.profiler.chrome_trace.reader import ChromeTrace
from ebbtide.profiler.memory_snapshot.sandboxed_unpickler import ENGINE

_CPU = 0
_MEMORY = "[memory]"
_PYTHON = "python_function"
# `model.py(12): forward`; other names are those of functions that are built in, and of modules.
_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
# The evaluation of a node by the autograd engine.
_NODE = "autograd::engine::evaluate_function: "


def profiled_events(path: Path) -> pd.DataFrame:
    """Read the allocations and releases of the CPU from a trace with `profile_memory=True`.

    Releases of blocks that are older than the profile are not in it.

    Returns:
        Columns t_ns (Unix time), bytes (negative: a release), address, and stack (outermost frame first, each as
        `function (file:line)` with the line where the function begins; missing where `with_stack` was off), by time.

    Raises:
        OSError, ValueError: The file cannot be read.
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
            "address": np.array([event.args.address for event in changes], np.int64)[order],
            "stack": pd.Categorical([*stacks]),
        }
    )


def _stacks(changes: list[Event], times: IntArray, calls: list[Event]) -> Iterator[str | None]:
    """Yield the stack of each change, in order: the calls of its thread that are open at its time."""
    starts, ends = spans(calls) if calls else (np.empty(0, np.int64), np.empty(0, np.int64))
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
    """Return a stack as text. Of one in the backward, what the engine evaluates and what is inside of it."""
    nodes = [number for number, line in enumerate(lines) if line.startswith(_NODE)]
    if nodes:
        node = lines[nodes[-1]].removeprefix(_NODE)
        return "\n".join([ENGINE, node, *lines[nodes[-1] + 1 :]])
    return "\n".join(lines) or None
