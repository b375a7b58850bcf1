"""Tests the content of the report's timeline: lines, boxes and notes in the units of
its axes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ebbtide.analysis.metrics.iteration_stats import compare_iterations
from ebbtide.analysis.metrics.job import JobMetrics
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.substeps.operations import named_ops
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.report.page_panels import panel_notes
from ebbtide.analysis.report.rank import ShownRank, rank_view
from ebbtide.analysis.report.timeline_content import (
    DetailLimits,
    TimelineContent,
    substep_chart_boxes,
    timeline_content,
)
from ebbtide.analysis.timeline.axis import TimeAxis
from ebbtide.analysis.timeline.panels import TimelinePanel
from ebbtide.analysis.timeline.styles import COLORS
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job
from tests.analysis.report.report_traces import GIB, GPU, MS, trained


def content_of(
    trace: Trace, max_points: int = 10_000, min_bytes: int | None = None
) -> TimelineContent:
    """Return the content of rank 0's timeline, with windows if `min_bytes` is given."""
    windows = None if min_bytes is None else find_windows(trace, min_bytes, [0])
    content = timeline_content(trace, 0, windows, DetailLimits(max_points, 1000, 50))
    assert content is not None
    return content


def panel_of(trace: Trace, name: str, max_points: int = 10_000) -> TimelinePanel:
    """Return a panel of rank 0's timeline."""
    return next(
        panel for panel in content_of(trace, max_points).panels if panel.name == name
    )


def test_timeline_content__measures_free_memory_above_its_pool_and_colors_unknown_pools() -> (
    None
):
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for pool in ("reserved", "allocated", "mine", "yours"):
        rank.memory(0, GIB, pool).memory(MS, 2 * GIB, pool)
    memory = panel_of(builder.build(), "memory")
    assert [(line.label, line.style.color) for line in memory.lines] == [
        ("reserved", "reserved"),
        ("allocated", "allocated"),
        ("mine", "extra-1"),
        ("yours", "extra-2"),
    ]
    assert memory.free_pool == "reserved"


def test_timeline_content__marks_samples_above_the_peak_and_says_so() -> None:
    builder = trained()
    for number in range(10):
        rate = 9e10 if number == 4 else 1e9
        builder.rank(0).link(
            (number + 1) * 10 * MS, 10 * MS, "gpm", h2d_bytes_per_s=rate
        )
    link = panel_of(builder.build(), "link")
    (line,) = link.lines
    assert np.isnan(line.values[4])
    assert np.nanmax(line.values) == 1e9
    assert line.above_peak_ns.tolist() == [50 * MS]
    assert panel_notes(link) == [
        "1 × h2d above the link's peak, which is impossible: marked at the edge"
    ]


def test_timeline_content__has_windows_between_memory_and_capacity() -> None:
    content = content_of(trained().build(), min_bytes=20 * GIB)
    windows = find_windows(trained().build(), 20 * GIB).windows
    assert content.windows is not None
    assert content.windows.left.tolist()[:3] == [0, 14, 17]
    bottoms = [40 - window.free_bytes / GIB for window in windows]
    assert content.windows.columns["bottom"].tolist() == pytest.approx(bottoms)
    assert [strip.name for strip in content.strips] == ["phases", "always free"]


def test_substep_chart_boxes__draw_nested_sub_steps_last_in_known_colors() -> None:
    trace = deepspeed_job(iterations=2).build()
    boxes = substep_chart_boxes(named_ops(trace, 0), TimeAxis(0, 0, MS, MS))
    assert sum(len(part.left) for part in boxes.values()) == len(trace.ops(0))
    assert set(boxes) <= set(COLORS)
    assert boxes["update"].columns["op"] == ["update"] * 10
    assert boxes["update"].columns["subgroup"][:3] == ["0", "1", "2"]
    assert (boxes["h2d"].right - boxes["h2d"].left).tolist() == pytest.approx([20] * 10)
    assert boxes["h2d"].columns["bytes"] == ["190.73 MiB"] * 10
    # Later boxes are drawn on top: gradients going down are a part of reducing them.
    reduce, down = boxes["extra-4"], boxes["d2h"]
    assert list(boxes).index("extra-4") < list(boxes).index("d2h")
    assert reduce.left[0] <= down.left[0] < down.right[0] <= reduce.right[0]


def test_rank_view__draws_some_of_too_many_sub_steps_and_says_so() -> None:
    job = deepspeed_job(iterations=40).build()
    view = rank_view(
        JobMetrics(job),
        ShownRank(0, ""),
        compare_iterations(job),
        link_use(job),
        GIB,
        DetailLimits(10_000, 300, 50),
    )
    assert any("not all sub-steps are drawn" in note for note in view.timeline_notes)
    assert len(json.dumps(view.timeline)) < 300_000
