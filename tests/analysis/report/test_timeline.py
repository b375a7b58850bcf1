"""What the report's timeline draws: lines, windows and phases, where they belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ebbtide.analysis.report as package
from ebbtide.analysis.metrics.devices import memory_line
from ebbtide.analysis.metrics.iteration_stats import iterations
from ebbtide.analysis.metrics.link import link_use
from ebbtide.analysis.metrics.substeps.operations import named_ops
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.report.boxes import Choice, guaranteed_boxes, op_boxes, window_boxes
from ebbtide.analysis.report.lines import Panel, clock, panels
from ebbtide.analysis.report.rank import _lanes, rank_view
from ebbtide.interleave.policies import make_plan
from ebbtide.interleave.replay.schedule_to_trace import trace_of
from ebbtide.interleave.simulation.simulator import simulate
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import deepspeed_job
from tests.analysis.report.report_traces import GIB, GPU, MS, train, trained
from tests.interleave.experiments.sweep.sweeps import machine, workload


def panel(trace: Trace, name: str, most: int = 10_000) -> Panel:
    at = clock(trace, 0)
    assert at is not None
    return next(p for p in panels(trace, 0, at, most) if p.name == name)


def test_lines_are_in_the_units_of_their_panels_and_begin_with_the_first_iteration() -> None:
    builder = trained()
    builder.rank(0).memory(-5 * MS, 100 * GIB, "host", "cpu")
    trace = builder.build()
    memory, host = panel(trace, "memory"), panel(trace, "host memory")
    assert [line.name for line in memory.lines] == ["device", "allocated"]
    assert (memory.unit, memory.level, memory.level_text) == ("GiB", 40.0, "capacity 40.00 GiB")
    assert memory.lines[0].x[:3].tolist() == [0, 4, 14]
    assert memory.lines[0].y[:3].tolist() == [10, 30, 8]
    assert (host.lines[0].x.tolist(), host.lines[0].y.tolist(), host.level) == ([-5, 112], [100, 100], None)


def test_a_capacity_far_above_the_lines_is_off_the_scale_and_said() -> None:
    builder = TraceBuilder()
    train(builder.rank(0, devices=[{**GPU, "capacity_bytes": 4000 * GIB}]))
    trace = builder.build()
    assert panel(trace, "memory").level_is_off
    assert panel(trace, "memory").top == pytest.approx(33)
    assert panel(trace, "memory").level_text == "capacity 3.91 TiB"


def test_free_is_above_the_pool_that_says_most_and_unknown_pools_have_colours_of_their_own() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    for pool in ("reserved", "allocated", "mine", "yours"):
        rank.memory(0, GIB, pool).memory(MS, 2 * GIB, pool)
    memory = panel(builder.build(), "memory")
    assert [(line.name, line.color) for line in memory.lines] == [
        ("reserved", "reserved"),
        ("allocated", "allocated"),
        ("mine", "pool-1"),
        ("yours", "pool-2"),
    ]
    assert memory.free_above == "allocated"


def test_a_thinned_line_is_noted() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU])
    sizes = np.random.default_rng(0).integers(0, GIB, 5000)
    rank.extend("memory", t_ns=np.arange(5000), device="cuda:0", pool="device", bytes=sizes)
    memory = panel(builder.build(), "memory", 300)
    (line,) = memory.lines
    assert len(line.x) <= 101
    assert line.y.max() * memory.scale == sizes.max()
    assert "smallest and the largest" in memory.notes[0]


copies = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60), st.integers(0, 10**6)), min_size=1, max_size=12)


@given(copies, st.integers(9, 60))
def test_the_area_under_the_links_line_is_the_bytes_that_were_copied(rows: Any, most: int) -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU], transfers_recorded=True)
    for start, length, size in rows:
        rank.transfer("h2d", start, start + length, size)
    link = panel(builder.build(), "link", most)
    for line in link.lines:
        nanoseconds = np.diff(line.x) * 1e6  # the trace is short: its clock is in ms
        area = float((line.y[:-1] * nanoseconds).sum())
        assert area == pytest.approx(sum(size for *_, size in rows) if line.name == "h2d" else 0, rel=1e-6, abs=1e-3)


def test_samples_above_the_links_peak_are_left_out_and_said() -> None:
    builder = trained()
    for number in range(10):
        rate = 9e10 if number == 4 else 1e9
        builder.rank(0).link((number + 1) * 10 * MS, 10 * MS, "gpm", h2d_bytes_per_s=rate)
    link = panel(builder.build(), "link")
    (line,) = link.lines
    assert np.isnan(line.y[4])
    assert np.nanmax(line.y) == pytest.approx(1.0)
    assert link.notes == ("samples of h2d above the link's peak are left out: 1",)


def test_windows_hang_from_the_capacity_where_they_lie_in_the_trace() -> None:
    trace = trained().build()
    at = clock(trace, 0)
    assert at is not None
    windows = find_windows(trace, 20 * GIB).windows
    boxes, free = window_boxes(trace, 0, at, windows, Choice(trace, 0, len(windows), 0, 100))
    times, used = memory_line(trace, 0, "device")
    assert len(boxes.left) == len(windows) == len(free)
    assert boxes.left.tolist()[:3] == [0, 14, 17]
    for left, right, least in zip(boxes.left, boxes.right, free, strict=True):
        first = int(np.searchsorted(times, left * MS, side="right")) - 1
        assert 40 * GIB - used[first : np.searchsorted(times, right * MS)].max() == least


def test_what_is_always_free_lies_at_the_same_place_of_each_iteration() -> None:
    trace = trained().build()
    at = clock(trace, 0)
    assert at is not None
    boxes = guaranteed_boxes(trace, 0, at, 20 * GIB, Choice(trace, 0, 0, 3, 100))
    for phase in ("forward", "update"):
        places = [left for left, name in zip(boxes.left, boxes.facts["phase"], strict=True) if name == phase]
        assert np.diff(places).tolist() == [19] * 5


def test_sub_steps_are_drawn_in_colours_that_the_page_has_a_part_over_its_whole() -> None:
    trace = deepspeed_job(iterations=2).build()
    at = clock(trace, 0)
    assert at is not None
    boxes = op_boxes(named_ops(trace, 0), at, Choice(trace, 0, len(trace.ops(0)), 0, 1000))
    assert sum(len(of.left) for of in boxes.values()) == len(trace.ops(0))
    styles = (Path(package.__file__).parent / "templates" / "page.css").read_text()
    assert all(f"--{color}:" in styles for color in boxes)
    assert boxes["update"].facts["op"] == ["update"] * 10
    assert boxes["update"].facts["subgroup"][:3] == ["0", "1", "2"]
    assert (boxes["h2d"].right - boxes["h2d"].left).tolist() == pytest.approx([20] * 10)
    assert boxes["h2d"].facts["bytes"] == ["190.73 MiB"] * 10
    # What is drawn later lies above: gradients going down are a part of reducing them.
    assert list(boxes).index("pool-4") < list(boxes).index("d2h")
    assert boxes["pool-4"].left[0] <= boxes["d2h"].left[0] < boxes["d2h"].right[0] <= boxes["pool-4"].right[0]


def test_of_too_many_sub_steps_some_iterations_are_drawn_and_the_page_says_so() -> None:
    job = deepspeed_job(iterations=40)
    drawn = rank_view(job.build(), 0, iterations(job.build()), link_use(job.build()), GIB, 10_000, 300, 50)
    assert any("not all sub-steps are drawn" in note for note in drawn.timeline_notes)
    assert len(json.dumps(drawn.timeline)) < 300_000


def test_a_schedules_operations_have_a_lane_for_each_resource() -> None:
    names = [name for name, _ in _lanes(simulated(), 0)]
    assert names == ["cpu", "gpu", "h2d", "d2h"]
    assert [name for name, _ in _lanes(deepspeed_job(iterations=1).build(), 0)] == ["sub-steps"]
    assert list(_lanes(trained().build(), 0)) == []


def simulated() -> Trace:
    job, box = workload(), machine()
    return trace_of(simulate(make_plan("interleaved:2", job, box), job, box), box).build()


def test_of_too_many_boxes_one_iteration_in_some_is_drawn_whole() -> None:
    trace = trained(60).build()
    choose = Choice(trace, 0, 0, 0, 100)
    rows = trace.phases(0)
    kept = rows.iloc[choose(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())]
    assert choose.step == 4
    assert sorted(set(kept["iteration"])) == list(range(0, 60, 4))
    assert len(kept) == 3 * 15


def test_of_too_many_windows_without_iterations_the_longest_are_drawn() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[GPU])
    trace = builder.build()
    choose = Choice(trace, 0, 50, 0, 10)
    starts = np.arange(50) * 100
    assert choose(starts, starts + np.arange(50)).tolist() == list(range(40, 50))
    assert choose.left_out == 40
