"""Writes a trace as a file for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import gzip
import io
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.activity.activity import queue_length
from ebbtide.analysis.metrics.critical_path.critical_path import Segment, critical_path
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.memory_spans import memory_spans
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.errors import TraceError
from ebbtide.features.export.trace_events import Process, any_overlap, dumps
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace

# Categories that torch's profiler gives to activities.
_CATEGORIES = {
    "compute": "kernel",
    "communication": "kernel",
    "copy": "gpu_memcpy",
    "memset": "gpu_memset",
}
COPY = "copy"
# Tracks of streams; all others are on one of this name.
_MAX_TRACKS = 1000
OTHER_STREAMS = "other streams"
# How long a launch is drawn, for a flow to begin at: a call takes longer, but the trace
# has no time for its end.
_LAUNCH_NS = 1000


def checked(trace: Trace, rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return rows with start_ns and end_ns. Raises TraceError where one ends before it
    starts."""
    if (rows["end_ns"] < rows["start_ns"]).any():
        raise TraceError(f"{trace.path} is damaged: {kind} ends before it starts")
    return rows


def device_events(
    process: Process, trace: Trace, rank: int, flows: Iterator[int]
) -> Iterator[str]:
    """Yield kernels and copies of a rank on a track per device and stream.

    Launches are yielded, too. Without kernels, copies are on a track per direction, or
    per stream where copies of one direction overlap. A flow leads from each launch to
    what it launched; `flows` are their numbers, which all ranks share.
    """
    kernels = _correlated(checked(trace, trace.kernels(rank), "a kernel"), flows)
    copies = _correlated(checked(trace, trace.transfers(rank), "a copy"), flows)
    if kernels.empty:
        yield from _copies_alone(process, copies)
    else:
        yield from _streams(process, kernels, copies)
    yield from _launches(process, pd.concat([kernels, copies]))


def annotation_events(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield named ranges on a track per thread of the job, nested where one is within
    another."""
    rows = checked(trace, trace.annotations(rank), "an annotation")
    for thread, group in rows.groupby("thread", dropna=False, sort=True):
        track = "annotations" if pd.isna(thread) else f"annotations thread {thread}"
        starts, ends = (
            group[side].to_numpy(np.int64) for side in ("start_ns", "end_ns")
        )
        yield from process.slices(
            track, {"user_annotation": group}, _enclosing(starts, ends)
        )


def _correlated(rows: pd.DataFrame, flows: Iterator[int]) -> pd.DataFrame:
    """Return the rows with the number of a flow for each that has a launch before it.

    A flow does not go back.
    """
    has_launch = (rows["launch_ns"] <= rows["start_ns"]).fillna(False)
    return rows.assign(
        correlation=pd.array(
            [next(flows) if has else None for has in has_launch], "Int64"
        )
    )


def _streams(
    process: Process, kernels: pd.DataFrame, copies: pd.DataFrame
) -> Iterator[str]:
    """Yield kernels and copies on a track per device and stream."""
    since = (
        (kernels["start_ns"] - kernels["launch_ns"]).astype("Float64") / 1e3
    ).rename("us_since_launch")
    # These are known of some sources only.
    unused = [
        "launch_ns",
        *(
            name
            for name in ("group", "operator", "flops", "bytes")
            if kernels[name].isna().all()
        ),
    ]
    tables = {
        category: rows.drop(columns=unused).join(since)
        for category, rows in kernels.groupby(
            kernels["kind"].map(_CATEGORIES).astype(str), observed=True
        )
    }
    tables[COPY] = copies.drop(columns="launch_ns")
    keys = _track_keys(tables)
    parts = {
        category: dict(iter(rows.groupby(keys[category])))
        for category, rows in tables.items()
    }
    for device, stream in sorted({key for groups in parts.values() for key in groups}):
        track = f"{device} stream {'?' if stream < 0 else stream}"
        track = OTHER_STREAMS if device == OTHER_STREAMS else track
        on_stream = {
            category: groups[device, stream]
            for category, groups in parts.items()
            if (device, stream) in groups
        }
        yield from process.slices(track, on_stream, flow="end")


def _track_keys(tables: dict[str, pd.DataFrame]) -> dict[str, list[pd.Series[Any]]]:
    """Return the device and stream of the track of each row, by category.

    Streams with little work share a track where there are more than people can see.
    """
    keys = {
        category: [
            rows["device"].astype(str),
            rows["stream"].fillna(-1).astype("int64"),
        ]
        for category, rows in tables.items()
    }
    tracks = {
        category: pd.MultiIndex.from_arrays(own) for category, own in keys.items()
    }
    first, *others = tracks.values()
    counts = first.append(others).value_counts()
    if len(counts) > _MAX_TRACKS:
        for category, (device, stream) in keys.items():
            kept = tracks[category].isin(counts.index[:_MAX_TRACKS])
            keys[category] = [
                device.where(kept, OTHER_STREAMS),
                stream.where(kept, -1),
            ]
    return keys


def _copies_alone(process: Process, copies: pd.DataFrame) -> Iterator[str]:
    for (device, direction), group in copies.drop(columns="launch_ns").groupby(
        ["device", "direction"], sort=True
    ):
        track = f"{direction} copies {device}"
        if not any_overlap(
            group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64)
        ):
            yield from process.slices(track, {COPY: group}, flow="end")
            continue
        for stream, part in group.groupby("stream", dropna=False):
            stream_track = f"{track} stream {'?' if pd.isna(stream) else stream}"
            yield from process.slices(stream_track, {COPY: part}, flow="end")


def _launches(process: Process, rows: pd.DataFrame) -> Iterator[str]:
    """Yield a short slice per launch, up to the next one at most."""
    rows = rows[rows["correlation"].notna()].sort_values("launch_ns", kind="stable")
    starts = rows["launch_ns"].to_numpy(np.int64)
    gaps = np.append(np.diff(starts), _LAUNCH_NS)
    launches = pd.DataFrame(
        {
            "name": "launch",
            "start_ns": starts,
            "end_ns": starts + np.clip(gaps, 1, _LAUNCH_NS),
            "correlation": rows["correlation"].array,
        }
    )
    yield from process.slices(
        "launches (host)", {"cuda_runtime": launches}, flow="start"
    )


def _enclosing(starts: Ints, ends: Ints) -> list[int | None]:
    """Return for each interval the innermost one around it.

    Return None where there is none.
    """
    parents: list[int | None] = [None] * len(starts)
    around: list[int] = []
    for index in np.lexsort((-ends, starts)).tolist():
        while around and ends[around[-1]] <= starts[index]:
            around.pop()
        if around and ends[index] <= ends[around[-1]]:
            parents[index] = around[-1]
        around.append(index)
    return parents


_LINK_NOTE = (
    "Link counters: bytes/s over the window of each sample. The format has no gaps: "
    "between windows the counter is 0, "
    "and a slice 'not sampled' on a track of the same name marks the time without data."
)


def write_chrome_trace(trace: Trace, path: Path, force: bool = False) -> None:
    """Write a trace in the Trace Event Format (JSON), event by event.

    The file is complete or not written at all; it is gzip-compressed if the name ends
    in .gz. A rank is a process. Times are microseconds, exact to the nanosecond, after
    the first time of the trace, which is in `otherData` and, as Unix time if that is
    known, in `baseTimeNanoseconds`. Raises UserError and TraceError.
    """
    with (
        new_output(path, force, Path.is_file, "a file") as temporary,
        ExitStack() as stack,
    ):
        binary: Any = stack.enter_context(open(temporary, "wb"))
        if path.suffix.lower() == ".gz":
            binary = stack.enter_context(gzip.GzipFile("", "wb", 6, binary, mtime=0))
        file = stack.enter_context(
            io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="\n")
        )
        origin = _first_ns(trace)
        about = _about(trace, origin)
        base = (
            about["start_ns"]
            if about["start_unix_ns"] is None
            else about["start_unix_ns"]
        )
        head = {
            "displayTimeUnit": "ns",
            "baseTimeNanoseconds": base,
            "otherData": about,
        }
        file.write(f'{dumps(head)[:-1]},"traceEvents":[')
        for number, event in enumerate(events(trace, origin)):
            file.write(f",\n{event}" if number else f"\n{event}")
        file.write("\n]}\n")


def events(trace: Trace, origin_ns: int) -> Iterator[str]:
    """Yield every event of a trace as a JSON object; times count from origin_ns."""
    # Perfetto takes process 0 for the idle task, and a track with the number of its
    # process for the main thread.
    tids = itertools.count(len(trace.ranks) + 1)
    flows = itertools.count(1)
    # The critical path of the first rank, which may lead to others.
    path = critical_path(trace, trace.ranks[0]) if trace.ranks else None
    paths = pd.DataFrame(
        [] if path is None else path.segments,
        columns=[field.name for field in fields(Segment)],
    )
    paths = paths.astype({"rank": "int64", "start_ns": "int64", "end_ns": "int64"})
    for pid, rank in enumerate(trace.ranks, start=1):
        process = Process(pid, tids, origin_ns)
        device = first_device(trace, rank).name
        parts = (f"rank {rank}", device, "predicted" if is_predicted(trace) else None)
        yield from process.name_events(" · ".join(part for part in parts if part))
        yield from _phases(process, trace, rank)
        yield from annotation_events(process, trace, rank)
        yield from device_events(process, trace, rank, flows)
        yield from _ops(process, trace, rank)
        yield from _memory(process, trace, rank)
        yield from _link(process, trace, rank)
        yield from _gpu(process, trace, rank)
        times, lengths = queue_length(trace, rank)
        yield from process.counter(
            "queue", "launched, not begun", times.tolist(), lengths.tolist()
        )
        yield from process.slices(
            "critical path",
            {"critical_path": paths[paths["rank"] == rank].drop(columns="rank")},
        )


def _about(trace: Trace, origin_ns: int) -> dict[str, Any]:
    offset = trace.meta.clock.wall_offset_ns
    return {
        "trace": trace.path.name,
        "source": str(trace.meta.source),
        "start_ns": origin_ns,
        "start_unix_ns": origin_ns + offset if isinstance(offset, int) else None,
        "link": _LINK_NOTE,
        "notes": [str(note) for note in trace.notes],
    }


# Columns of the times at which events begin.
_BEGINS = {
    "phases": ("start_ns", "gpu_start_ns"),
    "transfers": ("start_ns", "launch_ns"),
    "ops": ("start_ns",),
    "memory": ("t_ns",),
    "gpu": ("t_ns",),
    "kernels": ("start_ns", "launch_ns"),
    "annotations": ("start_ns",),
}


def _first_ns(trace: Trace) -> int:
    """Return the time of the earliest event; 0 for a trace without events."""
    times = []
    for rank in trace.ranks:
        link = trace.columns(rank, "link")
        times += [
            intervals(trace, rank, device_times=False).starts,
            link.ints("t_ns") - link.ints("window_ns"),
        ]
        for name, columns in _BEGINS.items():
            rows = trace.columns(rank, name)
            times += [rows.ints(column)[rows.recorded(column)] for column in columns]
    return min((int(column.min()) for column in times if len(column)), default=0)


def _phases(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield iterations and phases by host times, and phases also by device times.

    The latter are phases with times of the device.
    """
    spans = intervals(trace, rank, device_times=False).spans
    spans = spans.assign(name="iteration " + spans["iteration"].astype(str))
    yield from process.slices(
        "iterations", {"iteration": checked(trace, spans, "an iteration")}
    )
    phases = trace.phases(rank).rename(columns={"phase": "name"})
    columns = ["name", "start_ns", "end_ns", "iteration", "micro_step"]
    yield from process.slices(
        "phases (host)", {"phase": checked(trace, phases[columns], "a phase")}
    )
    device_phases = phases[
        phases["gpu_start_ns"].notna() & phases["gpu_end_ns"].notna()
    ]
    device_phases = device_phases.assign(
        start_ns=device_phases["gpu_start_ns"].astype("int64"),
        end_ns=device_phases["gpu_end_ns"].astype("int64"),
    )
    device_phases = checked(trace, device_phases[columns], "a phase")
    yield from process.slices("phases (device)", {"device phase": device_phases})


def _ops(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield ops on a track per resource.

    An op is nested in its parent if both use the same resource.
    """
    rows = checked(trace, trace.ops(rank), "an op")
    rows = rows.assign(row=np.arange(len(rows)))
    for resource, group in rows.groupby("resource", sort=True):
        index = {row: number for number, row in enumerate(group["row"])}
        parents = [
            None if pd.isna(parent) else index.get(parent) for parent in group["parent"]
        ]
        yield from process.slices(f"ops {resource}", {"op": group}, parents)


def _memory(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    for (device, pool), rows in trace.memory(rank).groupby(
        ["device", "pool"], sort=True, observed=True
    ):
        times, sizes = rows["t_ns"].tolist(), rows["bytes"].tolist()
        name = f"memory {device} {pool}"
        yield from process.counter(name, "bytes", times, sizes)
        if (spans := memory_spans(trace, rank, pool)) is not None and len(spans[0]) > 1:
            # Between slices on demand the last value of a counter stands.
            gaps = pd.DataFrame(
                {
                    "name": "not recorded",
                    "start_ns": spans[1][:-1],
                    "end_ns": spans[0][1:],
                }
            )
            yield from process.slices(f"{name}: not recorded", {"unknown": gaps})


def _link(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    for device, rows in trace.link(rank).groupby("device", sort=True, observed=True):
        for direction in DIRECTIONS:
            rates = rows[f"{direction}_bytes_per_s"].to_numpy(np.float64)
            is_sampled = np.isfinite(rates)
            ends = rows["t_ns"].to_numpy(np.int64)[is_sampled]
            windows = rows["window_ns"].to_numpy(np.int64)[is_sampled]
            times, values, gaps = _rate_line(ends, windows, rates[is_sampled])
            name = f"link {device} {direction}"
            yield from process.counter(name, "bytes/s", times.tolist(), values.tolist())
            yield from process.slices(f"{name}: not sampled", {"unknown": gaps})


def _gpu(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield a counter per device and column of the table `gpu`."""
    for device, rows in trace.gpu(rank).groupby("device", sort=True, observed=True):
        for column in rows.columns.drop(["t_ns", "device"]):
            recorded = rows[np.isfinite(rows[column].astype("float64"))]
            quantity, _, unit = column.rpartition("_")
            times, values = recorded["t_ns"].tolist(), recorded[column].tolist()
            yield from process.counter(
                f"gpu {device} {quantity.replace('_', ' ')}", unit, times, values
            )


def _rate_line(ends: Ints, windows: Ints, rates: Any) -> tuple[Ints, Any, pd.DataFrame]:
    """Return (times, rates, gaps between windows) of samples.

    Each is a mean over the window before it.
    """
    if not len(ends):
        return ends, rates, pd.DataFrame({"name": [], "start_ns": ends, "end_ns": ends})
    # Of overlapping windows the earlier one counts up to its end.
    starts = np.maximum(ends - windows, np.append(ends[0] - windows[0], ends[:-1]))
    open_end = np.append(starts[1:] > ends[:-1], True)
    times = np.concatenate([starts, ends[open_end]])
    values = np.concatenate([rates, np.zeros(int(open_end.sum()))])
    order = np.argsort(times, kind="stable")
    gap = np.flatnonzero(open_end[:-1])
    gaps = pd.DataFrame(
        {"name": "not sampled", "start_ns": ends[gap], "end_ns": starts[gap + 1]}
    )
    return times[order], values[order], gaps
