"""The picture of the GPU's activity: heights of lanes are shares of time."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.plot.pictures import LINKED, labels, notes, train

MS = 10**6


def test_draw__activity_has_a_lane_for_each_kind() -> None:
    builder = TraceBuilder()
    rank = builder.rank(
        0, devices=[{"device": "cuda:0", "kind": "cuda"}], first_iteration_start_ns=0
    )
    rank.phase("forward", 0, 100 * MS, 0, 0, 0, 100 * MS)
    rank.kernel(0, 50 * MS).kernel(25 * MS, 75 * MS, "communication").transfer(
        "h2d", 90 * MS, 100 * MS, 8
    )
    axes = draw([builder.build()], (0, 1), kind="activity").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "idle",
        "copy",
        "communication",
        "compute",
    ]
    lanes = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    for number, (lane, share) in enumerate(
        zip(lanes, (0.15, 0.1, 0.5, 0.5), strict=True)
    ):
        values, edges, _ = lane.get_data()
        mean = np.average(values - number, weights=np.diff(edges))
        assert mean == pytest.approx(0.86 * share, rel=1e-6)
    assert labels(axes) == ["idle: launch not recorded", "forward"]


def test_draw__shows_the_whole_time_of_kernels_alone() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    rank.kernel(100 * MS, 150 * MS).kernel(400 * MS, 500 * MS, launch_ns=390 * MS)
    (axes,) = draw([builder.build()]).axes
    assert axes.get_xlim() == (0, 400)
    assert len(axes.get_yticklabels()) == 4
    assert labels(axes) == ["idle: host busy"]
    assert notes(axes).startswith("no memory was recorded · no GPU link was recorded")


def test_draw__all_has_memory_link_and_activity_but_both_only_the_first_two() -> None:
    builder = TraceBuilder()
    rank = train(builder.rank(0, devices=[LINKED]))
    rank.kernel(MS, 5 * MS).transfer("h2d", 5 * MS, 6 * MS, 1000)
    trace = builder.build()
    names = [
        [axes.get_ylabel() for axes in draw([trace], kind=kind).axes]
        for kind in ("both", "all")
    ]
    assert names == [
        ["memory (MiB)", "link (MB/s)"],
        ["memory (MiB)", "link (MB/s)", ""],
    ]
    assert "phases behind" not in notes(draw([trace], kind="all").axes[0])


def test_draw__activity_needs_kernels() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase(
        "forward", 0, MS, 0
    )
    with pytest.raises(TraceError, match=r"ProfilerActivity\.CUDA"):
        draw([builder.build()], kind="activity")
