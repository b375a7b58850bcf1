"""Tests the limits on boxes and lines."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ebbtide.analysis.timeline.axis import BoxSampler, Resolution
from ebbtide.analysis.timeline.boxes import phase_boxes
from tests.analysis.report.report_traces import trained


def test_box_sampler__draws_whole_iterations_in_strides() -> None:
    trace = trained(60).build()
    phases = phase_boxes(trace, 0)
    starts = phases.loc[phases["phase"] == "forward", "start_ns"].to_numpy()
    sampler = BoxSampler(starts, 2 * len(phases), 100)
    sample = sampler.sample(phases)
    assert sampler.stride == 4
    assert sampler.dropped == 0
    assert sorted(set(sample["iteration"])) == list(range(0, 60, 4))
    assert len(sample) == 3 * 15


def test_box_sampler__draws_the_longest_without_iterations() -> None:
    sampler = BoxSampler(np.empty(0, np.int64), 50, 10)
    starts = np.arange(50) * 100
    boxes = pd.DataFrame({"start_ns": starts, "end_ns": starts + np.arange(50)})
    assert sampler.sample(boxes).index.tolist() == list(range(40, 50))
    assert (sampler.stride, sampler.dropped) == (1, 40)


def test_box_sampler__returns_empty_tables_as_they_are() -> None:
    boxes = pd.DataFrame({"start_ns": [], "end_ns": [], "phase": []})
    assert len(BoxSampler(np.empty(0, np.int64), 0, 10).sample(boxes)) == 0


def test_resolution__has_at_least_one_slot() -> None:
    resolution = Resolution(slots=1000, steps_per_slot=4)
    assert [resolution.slots_within(part, 10**6) for part in (1, 10**5, 10**6)] == [
        1,
        100,
        1000,
    ]
