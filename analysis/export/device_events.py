"""Events of an exported file for kernels, copies and their launches, and for ranges that the job names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from ebbtide.analysis.export.trace_events import Process
from ebbtide.analysis.timeseries.lanes import any_overlap
from ebbtide.analysis.timeseries.step_functions import Ints
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace

# Categories that torch's profiler gives to activities.
_CATEGORIES = {"compute": "kernel", "communication": "kernel", "copy": "gpu_memcpy", "memset": "gpu_memset"}
COPY = "copy"
# How long a launch is drawn, for a flow to begin at: a call takes longer, but the trace has no time for its end.
_LAUNCH_NS = 1000


def checked(trace: Trace, rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return rows with start_ns and end_ns.

    Raises:
        TraceError: A row ends before it starts.
    """
    if (rows["end_ns"] < rows["start_ns"]).any():
        raise TraceError(f"{trace.path} is damaged: {kind} ends before it starts")
    return rows


def device_events(process: Process, trace: Trace, rank: int, first_correlation: int) -> Iterator[str]:
    """Yield kernels and copies of a rank, and their launches.

    Kernels are on a track per device and stream, and so are copies in a trace with kernels. Without kernels, copies are
    on a track per device and direction, or per stream where copies of one direction overlap. A flow leads from each
    launch to what it launched. `first_correlation` is the number of the first flow, as `count_launches` of the ranks
    before add up to.
    """
    kernels = checked(trace, trace.kernels(rank), "a kernel")
    copies = checked(trace, trace.transfers(rank), "a copy")
    kernels, copies = (
        _correlated(kernels, first_correlation),
        _correlated(copies, first_correlation + int(_has_launch(kernels).sum())),
    )
    if kernels.empty:
        yield from _copies_alone(process, copies)
    else:
        yield from _streams(process, kernels, copies)
    yield from _launches(process, pd.concat([kernels, copies]))


def count_launches(trace: Trace, rank: int) -> int:
    """Return the number of kernels and copies with a flow."""
    return sum(int(_has_launch(rows).sum()) for rows in (trace.kernels(rank), trace.transfers(rank)))


def annotation_events(process: Process, trace: Trace, rank: int) -> Iterator[str]:
    """Yield named ranges on a track per thread of the job, nested where they are within each other."""
    rows = checked(trace, trace.annotations(rank), "an annotation")
    for thread, group in rows.groupby("thread", dropna=False, sort=True):
        track = "annotations" if pd.isna(thread) else f"annotations thread {thread}"
        starts, ends = (group[side].to_numpy(np.int64) for side in ("start_ns", "end_ns"))
        yield from process.slices(track, {"user_annotation": group}, _enclosing(starts, ends))


def _has_launch(rows: pd.DataFrame) -> pd.Series[bool]:
    """Return which rows have a launch that a flow can begin at: a flow does not go back in time."""
    return (rows["launch_ns"] <= rows["start_ns"]).fillna(False).astype(bool)


def _correlated(rows: pd.DataFrame, first: int) -> pd.DataFrame:
    """Return the rows with a number for each that has a launch, from `first`."""
    has_launch = _has_launch(rows)
    numbers = has_launch.cumsum() + (first - 1)
    return rows.assign(correlation=numbers.astype("Int64").where(has_launch))


def _streams(process: Process, kernels: pd.DataFrame, copies: pd.DataFrame) -> Iterator[str]:
    """Yield kernels and copies on a track per device and stream."""
    since = ((kernels["start_ns"] - kernels["launch_ns"]).astype("Float64") / 1e3).rename("us_since_launch")
    # These are known of some sources only.
    unused = ["launch_ns", *(name for name in ("group", "flops", "bytes") if kernels[name].isna().all())]
    tables = {
        category: rows.drop(columns=unused).join(since)
        for category, rows in kernels.groupby(kernels["kind"].map(_CATEGORIES).astype(str), observed=True)
    }
    tables[COPY] = copies.drop(columns="launch_ns")
    parts = {category: dict(iter(_by_stream(rows))) for category, rows in tables.items()}
    for device, stream in sorted({key for groups in parts.values() for key in groups}):
        track = f"{device} stream {'?' if stream < 0 else stream}"
        on_stream = {
            category: groups[device, stream] for category, groups in parts.items() if (device, stream) in groups
        }
        yield from process.slices(track, on_stream, flow="end")


def _by_stream(rows: pd.DataFrame) -> Any:
    return rows.groupby([rows["device"].astype(str), rows["stream"].fillna(-1).astype("int64")], sort=True)


def _copies_alone(process: Process, copies: pd.DataFrame) -> Iterator[str]:
    for (device, direction), group in copies.drop(columns="launch_ns").groupby(["device", "direction"], sort=True):
        track = f"{direction} copies {device}"
        if not any_overlap(group["start_ns"].to_numpy(np.int64), group["end_ns"].to_numpy(np.int64)):
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
    yield from process.slices("launches (host)", {"cuda_runtime": launches}, flow="start")


def _enclosing(starts: Ints, ends: Ints) -> list[int | None]:
    """Return for each interval the innermost one that it is within; None where there is none."""
    parents: list[int | None] = [None] * len(starts)
    around: list[int] = []
    for index in np.lexsort((-ends, starts)).tolist():
        while around and ends[around[-1]] <= starts[index]:
            around.pop()
        if around and ends[index] <= ends[around[-1]]:
            parents[index] = around[-1]
        around.append(index)
    return parents
