"""Boxes of a timeline: phases, sub-steps and windows of free memory.

Each kind is a table with a row per box.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

import numpy as np
import pandas as pd

from ebbtide.analysis.metrics.devices import capacity_bytes, free_pool, memory_timeline
from ebbtide.analysis.metrics.iterations import intervals
from ebbtide.analysis.metrics.substeps.operations import (
    STORAGE,
    named_ops,
    run_in_sequence,
)
from ebbtide.analysis.metrics.windows import Window, phase_table, recurring_segments
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeseries.step_functions import FreeTimeline
from ebbtide.profiler.trace import Trace

_RESOURCES = ("host", "cpu", "gpu", "h2d", "d2h")


def phase_boxes(trace: Trace, rank: int, on_gpu: bool = False) -> pd.DataFrame:
    """Return a box for each phase.

    Columns: phase, iteration (missing for an unfinished one), micro_step, start_ns,
    end_ns. Times are the host's, or with `on_gpu` the GPU's, without phases that have
    none.
    """
    times = ["gpu_start_ns", "gpu_end_ns"] if on_gpu else ["start_ns", "end_ns"]
    rows = trace.phases(rank)
    rows = rows[rows[times].notna().all(axis=1)]
    starts, ends = (rows[column].to_numpy(np.int64) for column in times)
    return rows[["phase", "iteration", "micro_step"]].assign(
        start_ns=starts, end_ns=ends
    )


def has_gpu_times(trace: Trace, rank: int) -> bool:
    """Return whether every phase of a finished iteration has times of the GPU."""
    rows = trace.phases(rank)
    finished = rows.loc[rows["iteration"].notna(), "gpu_end_ns"]
    return len(finished) > 0 and bool(finished.notna().all())


def substep_lanes(trace: Trace, rank: int) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield (name, rows of `named_ops`) of each lane of sub-steps.

    There is one lane for DeepSpeed's sub-steps, one for another process, for reads and
    for writes; of a schedule one per resource.
    """
    rows = named_ops(trace, rank)
    if run_in_sequence(rows):
        beside = rows["resource"].eq("worker") | rows["resource"].str.startswith(
            STORAGE
        )
        yield "sub-steps", rows[~beside]
        for resource in sorted(
            rows.loc[beside, "resource"].unique(),
            key=lambda name: (name != "worker", name),
        ):
            yield resource, rows[rows["resource"] == resource]
        return
    recorded = rows["resource"].unique()
    # Paths of the storage come after these, in the order of their numbers.
    for resource in (
        *_RESOURCES,
        *sorted(name for name in recorded if name not in _RESOURCES),
    ):
        if resource in recorded:
            yield resource, rows[rows["resource"] == resource]


def window_boxes(trace: Trace, rank: int, windows: Sequence[Window]) -> pd.DataFrame:
    """Return times and the fields of `Window` of some windows of a rank.

    The times are start_ns and end_ns, on the clock of the trace.
    """
    origins = (
        intervals(trace, rank, device_times=False)
        .spans.set_index("iteration")["start_ns"]
        .to_dict()
    )
    # Without phases the times of windows count from the first sample.
    first = memory_timeline(trace, rank, free_pool(trace) or "")[0][:1]
    begins = np.array(
        [
            int(first[0]) if w.iteration is None else origins[w.iteration]
            for w in windows
        ],
        np.int64,
    )
    boxes = pd.DataFrame(
        map(asdict, windows), columns=[field.name for field in fields(Window)]
    )
    boxes = boxes.astype(
        {
            "free_bytes": "int64",
            "h2d_idle_share": "float64",
            "d2h_idle_share": "float64",
        }
    )
    starts, ends = (
        np.rint(boxes[side].to_numpy(np.float64) * 1e6).astype(np.int64)
        for side in ("start_ms", "end_ms")
    )
    return boxes.assign(start_ns=begins + starts, end_ns=begins + ends)


def recurring_boxes(trace: Trace, rank: int, min_bytes: int) -> pd.DataFrame:
    """Return the windows that every iteration has, in each iteration.

    Columns: start_ns, end_ns, phase, free_bytes.
    """
    times, used = memory_timeline(trace, rank, free_pool(trace) or "")
    timeline = FreeTimeline(times, (capacity_bytes(trace, rank) or 0) - used)
    columns = {
        "start_ns": np.int64,
        "end_ns": np.int64,
        "phase": object,
        "free_bytes": np.int64,
    }
    tables = [pd.DataFrame(columns=list(columns))]
    for segment in recurring_segments(phase_table(trace, rank)):
        lengths = segment.ends - segment.starts
        for begins, ends, free_bytes in segment.windows(timeline, min_bytes):
            rows = {
                "start_ns": segment.starts + np.rint(lengths * begins).astype(np.int64),
                "end_ns": segment.starts + np.rint(lengths * ends).astype(np.int64),
                "phase": segment.phase,
                "free_bytes": free_bytes,
            }
            tables.append(pd.DataFrame(rows))
    return pd.concat(tables[1:] or tables, ignore_index=True).astype(columns)


def clip_boxes(boxes: pd.DataFrame, axis: TimeAxis) -> pd.DataFrame:
    """Return the boxes that overlap the axis, cut to it."""
    boxes = boxes[
        axis.overlaps(
            boxes["start_ns"].to_numpy(np.int64), boxes["end_ns"].to_numpy(np.int64)
        )
    ]
    times = {
        column: boxes[column].clip(axis.start_ns, axis.end_ns)
        for column in ("start_ns", "end_ns")
    }
    return boxes.assign(**times)
