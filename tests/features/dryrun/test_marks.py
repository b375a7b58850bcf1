"""Ranges that a job names, in a dry run: on the clocks of the host and of the GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbtide.analysis.metrics.devices import memory_timeline
from ebbtide.analysis.metrics.iterations import on_device_clock
from ebbtide.features.dryrun.session import DryRun, DryRunOptions
from ebbtide.features.dryrun.trace_of_run import trace_of_run
from ebbtide.profiler.agent.named_ranges import LISTENERS, named_range
from ebbtide.profiler.trace import Trace

STATE = 64 << 20


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return the dry run of a job that moves a buffer after its update.

    The host is far ahead of the GPU when the update ends for it.
    """
    before = [*LISTENERS]
    with DryRun(DryRunOptions(iterations=8, machine="rtx4090")) as run:
        model = torch.nn.Linear(4096, 4096, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = torch.zeros(STATE // 4, device="cuda")
        while True:
            with named_range("update"):
                for _ in range(2):
                    model(torch.ones(8192, 4096, device="cuda")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            with named_range("out"):
                state = state.to("cpu")
            with named_range("in"):
                state = state.to("cuda")
    assert before == LISTENERS
    return trace_of_run(run).build()


def test_marks__have_times_of_both_clocks(trace: Trace) -> None:
    marks = trace.marks(0)
    assert set(marks["name"]) == {"update", "out", "in"}
    updates = marks[marks["name"] == "update"]
    lag_ns = updates["gpu_end_ns"] - updates["end_ns"]
    assert (lag_ns > 1e6).all()
    # A copy to pageable memory ends for both.
    out = marks[marks["name"] == "out"]
    assert (out["gpu_end_ns"] <= out["end_ns"]).all()


def test_on_device_clock__follows_the_marks_between_phases(trace: Trace) -> None:
    on_device = on_device_clock(trace)
    times, sizes = memory_timeline(on_device, 0, "allocated")
    out = on_device.marks(0)
    out = out[out["name"] == "out"]
    for start, end in zip(out["gpu_start_ns"], out["gpu_end_ns"], strict=True):
        within = [np.searchsorted(times, at, side="right") - 1 for at in (start, end)]
        assert sizes[within[0]] - sizes[within[1]] == STATE
