"""Tests the report's lanes and tables of the GPU's activity, and its stack of memory by category."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ebbtide.analysis import TraceAnalysis
from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.report import build_page, render_page
from ebbtide.analysis.tables.activity import activity_tables, activity_view
from ebbtide.analysis.tables.table import Table
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.report.report_traces import GIB, ITERATION, MS, trained, with_categories, with_kernels

NONE = Findings((), ())


def values(table: Table, label: str) -> list[float | None]:
    (column,) = [column for column in table.columns if column.label == label]
    return [cell.value for cell in column.cells]


def test_activity_view__has_a_few_kernels_and_says_where_the_rest_is() -> None:
    trace = with_kernels(trained(), kernels=60).build()
    short, verbose = ([*activity_view(trace, gpu_activity(trace), flag)] for flag in (False, True))
    tables = {one.name: one for one in short if isinstance(one, Table)}
    assert list(tables) == ["activity", "activity-total", "causes", "kernels"]
    assert tables["kernels"].cut == "The first 5 of 50 rows: -v has more."
    assert short[-1] == "streams and operators: -v"
    names = [one.name for one in verbose if isinstance(one, Table)]
    assert names == [one.name for one in activity_tables(gpu_activity(trace))]


def test_activity_tables__are_absent_without_kernels() -> None:
    assert activity_tables(gpu_activity(trained().build())) == []


def test_build_page__has_a_table_of_the_critical_path() -> None:
    trace = with_kernels(trained()).build()
    path = TraceAnalysis(trace).rank(0).critical_path
    assert path is not None
    page = build_page(trace, NONE, GIB)
    (section,) = [section for section in page.ranks[0].sections if section.name == "activity"]
    (table,) = [table for table in section.tables if table.name == "critical-path"]
    times = [part.ms for part in path.parts]
    assert values(table, "time") == times
    assert values(table, "share") == [time_ms / path.length_ms for time_ms in times]
    assert sum(times) == pytest.approx(ITERATION / MS)
    assert "Critical path by part" in render_page(page)
    without = build_page(trained().build(), NONE, GIB).ranks[0].sections
    assert "critical-path" not in {table.name for section in without for table in section.tables}


def test_build_page__has_lanes_whose_areas_hold_the_time_of_each_kind() -> None:
    trace = with_kernels(trained()).build()
    (view,) = build_page(trace, NONE, GIB).ranks
    assert list(view.lanes) == ["compute", "communication", "copy", "idle"]
    total = gpu_activity(trace).total
    for lane, time_ms in zip(view.lanes.values(), (total.compute_ms, total.communication_ms), strict=False):
        (layer,) = lane.layers
        assert float((np.diff(lane.edges) * layer.values).sum()) / 1e6 == pytest.approx(time_ms)


def test_render_page__lists_areas_with_their_samples_and_draws_them() -> None:
    html = render_page(build_page(with_categories(with_kernels(trained())).build(), NONE, GIB))
    for key in ("activity/compute/category compute", "memory/category activation", "memory/category parameter"):
        assert f'data-line="{key}"' in html
        assert f'"name":{json.dumps(key)}' in html.replace('": "', '":"')
    assert html.count("VAreaStep") >= 6
    assert "Activity of the GPU" in html
    assert "compute &lt;kernel 0&gt;" in html  # names of kernels are text


def test_render_page__of_many_kernels_is_small() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    page = build_page(with_kernels(builder, kernels=60_000, length=1000).build(), NONE, GIB)
    assert any("activity: shares of" in note for note in page.ranks[0].timeline_notes)
    assert len(render_page(page)) < 5 * 10**6
