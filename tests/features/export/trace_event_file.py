"""Reads exported files, and checks them against the rules of the Trace Event Format."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd

from ebbtide.features.export.chrome_trace import write_chrome_trace
from ebbtide.profiler.trace import Trace

Event = dict[str, Any]


def export_and_read(trace: Trace, path: Path) -> dict[str, Any]:
    """Export a trace, check the file, and return its contents with numbers as
    decimals."""
    write_chrome_trace(trace, path)
    text = (
        gzip.decompress(path.read_bytes()).decode()
        if path.suffix == ".gz"
        else path.read_text(encoding="utf-8")
    )
    check(text)
    contents: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return contents


def ns(value: Any) -> int:
    """Convert microseconds of the file to nanoseconds."""
    exact = Decimal(value) * 1000
    assert abs(exact - round(exact)) <= Decimal("0.1")
    return round(exact)


def slices(file: dict[str, Any], category: str, pid: int = 1) -> list[Event]:
    """Return the slices of a category, with start_ns and end_ns on the trace's clock
    and the name of their track."""
    events = file["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    selected = [
        e for e in events if e["ph"] == "X" and e["cat"] == category and e["pid"] == pid
    ]
    for event in selected:
        event["track"] = tracks[event["tid"]]
        event["start_ns"] = file["otherData"]["start_ns"] + ns(event["ts"])
        event["end_ns"] = event["start_ns"] + ns(event["dur"])
    return selected


def flows(file: dict[str, Any]) -> dict[int, tuple[Event, Event]]:
    """Return by its number where each flow starts and ends."""
    ends = {e["id"]: e for e in file["traceEvents"] if e["ph"] == "f"}
    return {e["id"]: (e, ends[e["id"]]) for e in file["traceEvents"] if e["ph"] == "s"}


def counter(file: dict[str, Any], name: str, pid: int = 1) -> list[tuple[int, Any]]:
    """Return (time ns, value) of a counter."""
    start = file["otherData"]["start_ns"]
    events = [
        e
        for e in file["traceEvents"]
        if e["ph"] == "C" and e["name"] == name and e["pid"] == pid
    ]
    return [(start + ns(e["ts"]), *e["args"].values()) for e in events]


def rows(table: pd.DataFrame, *columns: str) -> Counter[tuple[Any, ...]]:
    """Count the rows of a table by the values of some columns."""
    values = table[list(columns)].astype(object)
    return Counter(
        values.where(values.notna(), None).itertuples(index=False, name=None)
    )


def values_of(events: list[Event], *keys: str) -> Counter[tuple[Any, ...]]:
    """Count events by the values of some keys or arguments."""
    return Counter(
        tuple(e[key] if key in e else e["args"][key] for key in keys) for e in events
    )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({key for key, _ in pairs}) == len(pairs), f"a key occurs twice: {pairs}"
    return dict(pairs)


def no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check(text: str) -> None:
    """Raise AssertionError if a file breaks a rule of the format, or of Perfetto's
    readers."""
    file = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    assert set(file) == {
        "displayTimeUnit",
        "baseTimeNanoseconds",
        "otherData",
        "traceEvents",
    }
    assert file["displayTimeUnit"] in ("ns", "ms")
    assert is_int(file["baseTimeNanoseconds"])
    assert isinstance(file["traceEvents"], list)
    for event in file["traceEvents"]:
        {
            "X": check_slice,
            "C": check_counter,
            "M": check_metadata,
            "s": check_flow,
            "f": check_flow,
        }[event["ph"]](event)
        assert is_int(event["pid"])
        assert event["pid"] > 0  # 0 is the idle task
    check_names(file["traceEvents"])
    check_counters_in_order(file["traceEvents"])
    check_nesting(file["traceEvents"])
    check_flows(file["traceEvents"])


def check_slice(event: Event) -> None:
    assert set(event) == {"ph", "pid", "tid", "ts", "dur", "cat", "name", "args"}
    assert is_int(event["tid"])
    assert is_number(event["ts"])
    assert event["ts"] >= 0
    assert is_number(event["dur"])
    assert event["dur"] >= 0
    assert isinstance(event["name"], str)
    assert isinstance(event["cat"], str)
    assert isinstance(event["args"], dict)


def check_counter(event: Event) -> None:
    assert set(event) == {"ph", "pid", "ts", "name", "args"}
    assert is_number(event["ts"])
    assert event["ts"] >= 0
    assert isinstance(event["name"], str)
    assert event["args"]
    assert all(is_number(value) for value in event["args"].values())


def check_flow(event: Event) -> None:
    keys = {"ph", "pid", "tid", "ts", "id", "cat", "name"}
    assert set(event) == (keys if event["ph"] == "s" else keys | {"bp"})
    # bound to the slice that is open at its time, not to the next one
    assert event.get("bp", "e") == "e"
    assert is_int(event["id"])


def check_flows(events: list[Event]) -> None:
    """Check that each flow has one start and one later end, each within a slice of its
    track that is written before."""
    sides: dict[str, dict[int, Any]] = {"s": {}, "f": {}}
    slices: set[tuple[int, Any]] = set()
    for event in events:
        if event["ph"] == "X":
            slices.add((event["tid"], event["ts"]))
        elif event["ph"] in sides:
            assert event["id"] not in sides[event["ph"]]
            sides[event["ph"]][event["id"]] = event["ts"]
            assert (event["tid"], event["ts"]) in slices
    assert set(sides["s"]) == set(sides["f"])
    assert all(start <= sides["f"][flow] for flow, start in sides["s"].items())


def check_metadata(event: Event) -> None:
    subject, _, kind = event["name"].partition("_")
    assert set(event) == {"ph", "pid", "name", "args"} | (
        {"tid"} if subject == "thread" else set()
    )
    assert subject in ("process", "thread")
    key, is_valid = {
        "name": ("name", lambda v: isinstance(v, str)),
        "sort_index": ("sort_index", is_int),
    }[kind]
    assert set(event["args"]) == {key}
    assert is_valid(event["args"][key])


def check_names(events: list[Event]) -> None:
    """Check that names and numbers of tracks are unique, also among processes: Perfetto
    identifies by them alone."""
    processes = Counter(
        e["pid"] for e in events if e["name"] == "process_name" and e["ph"] == "M"
    )
    threads = Counter(
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["ph"] == "M"
    )
    assert set(processes.values()) | set(threads.values()) <= {1}
    assert set(processes) == {e["pid"] for e in events}
    assert set(threads) == {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    tids = [tid for _, tid in threads]
    assert len(set(tids)) == len(tids)
    assert not set(tids) & set(processes)
    for pid in processes:
        names = [
            e["args"]["name"]
            for e in events
            if e["name"] == "thread_name" and e["pid"] == pid
        ]
        assert len(set(names)) == len(names)


def check_counters_in_order(events: list[Event]) -> None:
    last: dict[tuple[int, str], float] = {}
    for event in events:
        if event["ph"] == "C":
            key = event["pid"], event["name"]
            assert event["ts"] >= last.get(key, 0)
            last[key] = event["ts"]


def check_nesting(events: list[Event]) -> None:
    """Check that slices of a track nest or do not overlap, by times as Perfetto has
    them (truncated to nanoseconds).

    Slices that begin together are taken in the order of the file, and again with the
    longest first.
    """
    tracks: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = int(event["ts"] * 1000)
            tracks[event["tid"]].append((start, start + int(event["dur"] * 1000)))
    for slices in tracks.values():
        check_stack(sorted(slices, key=lambda s: s[0]))
        check_stack(sorted(slices, key=lambda s: (s[0], -s[1])))


def check_stack(slices: list[tuple[int, int]]) -> None:
    open_ends: list[int] = []
    for start, end in slices:
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "slices overlap without nesting"
        open_ends.append(end)
