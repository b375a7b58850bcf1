"""The picture of the GPU's activity: heights of lanes are shares of time."""

from __future__ import annotations

import pytest
from matplotlib.patches import StepPatch

from ebbtide.analysis.plot import draw
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import TraceBuilder

MS = 10**6


def test_draw__activity_has_a_lane_for_each_kind() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}], first_iteration_start_ns=0)
    rank.phase("forward", 0, 100 * MS, 0, 0, 0, 100 * MS)
    rank.kernel(0, 50 * MS).kernel(25 * MS, 75 * MS, "communication").transfer("h2d", 90 * MS, 100 * MS, 8)
    axes = draw([builder.build()], (0, 1), kind="activity").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["idle", "copy", "communication", "compute"]
    lanes = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
    for number, (lane, share) in enumerate(zip(lanes, (0.15, 0.1, 0.5, 0.5), strict=True)):
        values = lane.get_data().values - number
        assert values.mean() == pytest.approx(0.86 * share, rel=1e-3)


def test_draw__activity_needs_kernels() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}]).phase("forward", 0, MS, 0)
    with pytest.raises(TraceError, match=r"ProfilerActivity\.CUDA"):
        draw([builder.build()], kind="activity")
