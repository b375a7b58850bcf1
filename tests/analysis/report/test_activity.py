"""Tests the report's lanes and tables of the GPU's activity, and its stack of memory by
category."""

from __future__ import annotations

from ebbtide.analysis.findings import Findings
from ebbtide.analysis.metrics.activity.activity import gpu_activity
from ebbtide.analysis.report import build_page, render_page
from ebbtide.analysis.tables.activity import activity_tables, activity_view
from ebbtide.analysis.tables.table import Table
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.report.report_traces import GIB, trained, with_kernels

NONE = Findings((), ())


def values(table: Table, label: str) -> list[float | None]:
    (column,) = [column for column in table.columns if column.label == label]
    return [cell.value for cell in column.cells]


def test_activity_view__has_a_few_kernels_and_says_where_the_rest_is() -> None:
    trace = with_kernels(trained(), kernels=60).build()
    short, verbose = (
        [*activity_view(trace, gpu_activity(trace), flag)] for flag in (False, True)
    )
    tables = {one.name: one for one in short if isinstance(one, Table)}
    assert list(tables) == ["activity", "activity-total", "causes", "kernels"]
    assert tables["kernels"].cut == "The first 5 of 50 rows: -v has more."
    assert short[-1] == "streams and operators: -v"
    names = [one.name for one in verbose if isinstance(one, Table)]
    assert names == [one.name for one in activity_tables(gpu_activity(trace))]


def test_activity_tables__are_absent_without_kernels() -> None:
    assert activity_tables(gpu_activity(trained().build())) == []


def test_render_page__of_many_kernels_is_small() -> None:
    builder = TraceBuilder()
    builder.rank(0, devices=[{"device": "cuda:0", "kind": "cuda"}])
    page = build_page(
        with_kernels(builder, kernels=60_000, length=1000).build(), NONE, GIB
    )
    assert any("activity: shares of" in note for note in page.ranks[0].timeline_notes)
    assert len(render_page(page)) < 5 * 10**6
