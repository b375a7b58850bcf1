"""Writes a trace as a file for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import gzip
import io
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.export.device_events import annotation_events, checked, count_launches, device_events
from ebbtide.analysis.export.trace_events import Process, dumps
from ebbtide.analysis.metrics.devices import first_device
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.link_throughput import DIRECTIONS
from ebbtide.analysis.metrics.memory_spans import memory_spans
from ebbtide.analysis.metrics.prediction import is_predicted
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.output_files import new_output
from ebbtide.profiler.trace import Trace

_LINK_NOTE = (
    "Link counters: bytes/s over the window of each sample. The format has no gaps: between windows the counter is 0, "
    "and a slice 'not sampled' on a track of the same name marks the time without data."
)


def write_chrome_trace(trace: Trace, path: Path, force: bool = False) -> None:
    """Write a trace in the Trace Event Format (JSON), complete or not at all.

    The file has a process per rank, with tracks for iterations, phases, named ranges, kernels and copies by stream,
    launches and ops, flows from launches to kernels and copies, and counters for memory (bytes), link (bytes/s) and the
    state of the GPUs. Times are microseconds, exact to the nanosecond, after the first time of the trace, which is in
    `otherData` and, as Unix time if that is known, in `baseTimeNanoseconds`. Events are written one by one;
    gzip-compressed if the name of the file ends in .gz.

    Raises:
        UserError: The file cannot be written.
        TraceError: The trace cannot be read.
    """
    with (
        new_output(path, force, Path.is_file, "a file") as temporary,
        ExitStack() as stack,
    ):
        binary: Any = stack.enter_context(open(temporary, "wb"))
        if path.suffix.lower() == ".gz":
            binary = stack.enter_context(gzip.GzipFile("", "wb", 6, binary, mtime=0))
        file = stack.enter_context(io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="\n"))
        origin = _first_ns(trace)
        about = _about(trace, origin)
        base = about["start_ns"] if about["start_unix_ns"] is None else about["start_unix_ns"]
        head = {"displayTimeUnit": "ns", "baseTimeNanoseconds": base, "otherData": about}
        file.write(f'{dumps(head)[:-1]},"traceEvents":[')
        for number, event in enumerate(events(trace, origin)):
            file.write(f",\n{event}" if number else f"\n{event}")
        file.write("\n]}\n")


def events(trace: Trace, origin_ns: int) -> Iterator[str]:
    """Yield every event of a trace as a JSON object; times count from origin_ns."""
    # Perfetto takes process 0 for the idle task, and a track with the number of its process for the main thread.
    tids = itertools.count(len(trace.ranks) + 1)
    correlation = 1
    for pid, rank in enumerate(trace.ranks, start=1):
        process = Process(pid, tids, origin_ns)
        device = first_device(trace, rank).name
        parts = (f"rank {rank}", device, "predicted" if is_predicted(trace) else None)
        yield from process.name_events(" · ".join(part for part in parts if part))
        yield from _phases(process, trace, rank)
        yield from annotation_events(process, trace, rank)
        yield from device_events(process, trace, rank, correlation)
        correlation += count_launches(trace, rank)
        yield from _ops(process, trace, rank)
        yield from _memory(process, trace, rank)
        yield from _link(process, trace, rank)
        yield from _gpu(process, trace, rank)


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


def _first_ns(trace: Trace) -> int:
    """Return the time of the earliest event; 0 for a trace without events."""
    times = []
    for rank in trace.ranks:
        link = trace.link(rank)
        phases = trace.phases(rank)
        times += [
            intervals(trace, rank, device_times=False).spans["start_ns"],
            phases["start_ns"],
            phases["gpu_start_ns"].dropna(),
            trace.transfers(rank)["start_ns"],
            trace.ops(rank)["start_ns"],
            trace.memory(rank)["t_ns"],
            link["t_ns"] - link["window_ns"],
            trace.gpu(rank)["t_ns"],
            trace.kernels(rank)["start_ns"],
            trace.kernels(rank)["launch_ns"].dropna(),
            trace.transfers(rank)["launch_ns"].dropna(),
            trace.annotations(rank)["start_ns"],
        ]
    return min((int(column.min()) for column in times if len(column)), default=0)


def _phases(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield iterations and phases by host times, and phases with times of the device by those."""
    spans = intervals(trace, rank, device_times=False).spans
    spans = spans.assign(name="iteration " + spans["iteration"].astype(str))
    yield from process.slices("iterations", {"iteration": checked(trace, spans, "an iteration")})
    phases = trace.phases(rank).rename(columns={"phase": "name"})
    columns = ["name", "start_ns", "end_ns", "iteration", "micro_step"]
    yield from process.slices("phases (host)", {"phase": checked(trace, phases[columns], "a phase")})
    device_phases = phases[phases["gpu_start_ns"].notna() & phases["gpu_end_ns"].notna()]
    device_phases = device_phases.assign(
        start_ns=device_phases["gpu_start_ns"].astype("int64"), end_ns=device_phases["gpu_end_ns"].astype("int64")
    )
    device_phases = checked(trace, device_phases[columns], "a phase")
    yield from process.slices("phases (device)", {"device phase": device_phases})


def _ops(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield ops on a track per resource; an op is nested in its parent if both use the same resource."""
    rows = checked(trace, trace.ops(rank), "an op")
    rows = rows.assign(row=np.arange(len(rows)))
    for resource, group in rows.groupby("resource", sort=True):
        index = {row: number for number, row in enumerate(group["row"])}
        parents = [None if pd.isna(parent) else index.get(parent) for parent in group["parent"]]
        yield from process.slices(f"ops {resource}", {"op": group}, parents)


def _memory(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    for (device, pool), rows in trace.memory(rank).groupby(["device", "pool"], sort=True, observed=True):
        times, sizes = rows["t_ns"].tolist(), rows["bytes"].tolist()
        name = f"memory {device} {pool}"
        yield from process.counter(name, "bytes", times, sizes)
        if (spans := memory_spans(trace, rank, pool)) is not None and len(spans[0]) > 1:
            # Between slices on demand the last value of a counter stands.
            gaps = pd.DataFrame({"name": "not recorded", "start_ns": spans[1][:-1], "end_ns": spans[0][1:]})
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
            yield from process.counter(f"gpu {device} {quantity.replace('_', ' ')}", unit, times, values)


def _rate_line(ends: Ints, windows: Ints, rates: Any) -> tuple[Ints, Any, pd.DataFrame]:
    """Return (times, rates, gaps between windows) of samples, each of which is a mean over the window before it."""
    if not len(ends):
        return ends, rates, pd.DataFrame({"name": [], "start_ns": ends, "end_ns": ends})
    # Of overlapping windows the earlier one counts up to its end.
    starts = np.maximum(ends - windows, np.append(ends[0] - windows[0], ends[:-1]))
    open_end = np.append(starts[1:] > ends[:-1], True)
    times = np.concatenate([starts, ends[open_end]])
    values = np.concatenate([rates, np.zeros(int(open_end.sum()))])
    order = np.argsort(times, kind="stable")
    gap = np.flatnonzero(open_end[:-1])
    gaps = pd.DataFrame({"name": "not sampled", "start_ns": ends[gap], "end_ns": starts[gap + 1]})
    return times[order], values[order], gaps
