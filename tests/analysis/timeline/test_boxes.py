"""Tests the boxes of phases, sub-steps and windows."""

from __future__ import annotations

import numpy as np

from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.boxes import (
    clip_boxes,
    has_gpu_times,
    phase_boxes,
    recurring_boxes,
    substep_lanes,
    window_boxes,
)
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.schedule_to_trace import trace_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job
from tests.analysis.report.report_traces import GIB, MS, train, trained
from tests.interleave.job_files import machine, workload


def simulated() -> Trace:
    """Build the trace of a simulated schedule."""
    job, box = workload(), machine()
    return trace_of(
        simulate(make_plan("interleaved:2", job, box), job, box), box
    ).build()


def test_window_boxes__have_the_windows_at_times_of_the_trace() -> None:
    trace = trained().build()
    windows = find_windows(trace, 20 * GIB).windows
    boxes = window_boxes(trace, 0, windows)
    times, used = memory_timeline(trace, 0, "device")
    assert len(boxes) == len(windows)
    assert (boxes["start_ns"][:3] // MS).tolist() == [0, 14, 17]
    assert boxes["free_bytes"].tolist() == [window.free_bytes for window in windows]
    for start, end, free_bytes in boxes[
        ["start_ns", "end_ns", "free_bytes"]
    ].itertuples(index=False):
        first = int(np.searchsorted(times, start, side="right")) - 1
        assert 40 * GIB - used[first : np.searchsorted(times, end)].max() == free_bytes


def test_recurring_boxes__are_at_one_position_of_each_iteration() -> None:
    boxes = recurring_boxes(trained().build(), 0, 20 * GIB)
    for phase in ("forward", "update"):
        starts = boxes.loc[boxes["phase"] == phase, "start_ns"].to_numpy()
        assert (np.diff(starts) / MS).tolist() == [19] * 5


def test_recurring_boxes__are_empty_if_nothing_recurs() -> None:
    boxes = recurring_boxes(trained().build(), 0, 39 * GIB)
    assert len(boxes) == 0
    assert list(boxes.columns) == ["start_ns", "end_ns", "phase", "free_bytes"]


def test_substep_lanes__are_one_per_resource_of_a_schedule() -> None:
    assert [name for name, _ in substep_lanes(simulated(), 0)] == [
        "cpu",
        "gpu",
        "h2d",
        "d2h",
    ]
    assert [
        name for name, _ in substep_lanes(deepspeed_job(iterations=1).build(), 0)
    ] == ["sub-steps"]
    assert list(substep_lanes(trained().build(), 0)) == []


def test_phase_boxes__have_times_of_host_or_gpu() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), iterations=1, on_gpu=True)
    trace = builder.build()
    host, gpu = phase_boxes(trace, 0), phase_boxes(trace, 0, on_gpu=True)
    assert (
        host["phase"].tolist()
        == gpu["phase"].tolist()
        == ["forward", "backward", "update"]
    )
    assert (gpu["start_ns"] - host["start_ns"]).tolist() == [MS] * 3
    assert has_gpu_times(trace, 0)
    builder.rank(0).phase("forward", 20 * MS, 21 * MS, 1)
    assert len(phase_boxes(builder.build(), 0, on_gpu=True)) == 3
    assert not has_gpu_times(builder.build(), 0)


def test_clip_boxes__cuts_boxes_to_the_axis() -> None:
    builder = TraceBuilder()
    train(builder.rank(0), iterations=1)
    clipped = clip_boxes(
        phase_boxes(builder.build(), 0), TimeAxis(0, 2 * MS, 14 * MS, 12 * MS)
    )
    times = (clipped[["start_ns", "end_ns"]] // MS).to_numpy().tolist()
    assert times == [[2, 4], [4, 14]]
