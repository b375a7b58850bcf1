"""Tests the content of the page."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.analysis.findings import Finding, Findings, NotApplicable, Unknown, find
from ebbtide.analysis.metrics.advice import Advice, IterationGain
from ebbtide.analysis.report import build_page, render_page
from ebbtide.analysis.report.rank import RankView, Section
from ebbtide.analysis.tables.table import Table
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.metrics.ranks.fleets import fleet
from tests.analysis.report.parsed_page import NONE, ParsedPage, parse, plain_page
from tests.analysis.report.report_traces import (
    GIB,
    GPU,
    ITERATION,
    MS,
    trained,
    with_copies,
)
from tests.conftest import needs_all_features


def column(table: Table, label: str) -> list[str]:
    """Return the texts of a column."""
    return [
        cell.text for cell in next(c for c in table.columns if c.label == label).cells
    ]


def test_page__begins_with_the_job_and_key_figures() -> None:
    trace = with_copies(trained()).build("run.ebb")
    slow = Finding("slow", "it waits", 9.5, (), "do this")
    fast = Finding(
        "fast",
        "it waits",
        4.0,
        (),
        "do that",
        ("slow",),
        Advice("deepspeed", {}, "", IterationGain(15.0, 15.0, 19.0)),
    )
    content = build_page(trace, Findings((fast, slow), ()), GIB)
    assert (content.name, content.about) == (
        "run",
        "a recorded run · 1 rank · 6 iterations, the first 2 left out as warm-up",
    )
    assert [(f.label, f.value, f.context) for f in content.figures] == [
        ("iteration", "19.0 ms", "median of 4"),
        ("backward", "53 %", "10.0 ms, the most"),
        ("peak device memory", "30.00 GiB", "of 40.00 GiB"),
        ("always free memory", "10.00 GiB", "32.00 GiB in update"),
        (
            "copied per iteration",
            "166.89 MiB",
            "83.45 MiB h2d, 83.45 MiB d2h; 14 % of the link's peak",
        ),
        ("potential gain", "9.50 ms", "50 % of an iteration, at most: finding 2"),
    ]
    shown = ParsedPage(render_page(content))
    assert shown.texts["h2"][:3] == ["Key figures", "Findings", "Timeline"]
    head = " ".join(shown.texts["header"][0].split())
    assert "device a GPU, 40.00 GiB, PCIe 4 x16, 32 GB/s a direction" in head
    targets = [str(a["href"]).removeprefix("#") for a in shown.attributes("a")]
    assert {"findings", "section-timeline-0", "section-windows-0", "job"} <= set(
        targets
    )
    assert set(targets) <= {attributes.get("id") for _, attributes in shown.elements}


def test_page__has_findings_as_the_command_prints_them() -> None:
    finding = Finding(
        "rule",
        "the update waits <b>",
        9.5,
        ("it takes `3 ms`", "and more"),
        "update elsewhere",
    )
    first = Finding(
        "other",
        "memory is idle",
        4.0,
        (),
        "use it",
        ("rule",),
        Advice("deepspeed", {}, "", IterationGain(15.0, 15.0, 19.0)),
    )
    unknown = Unknown(
        "copies", "are copies pinned?", "record them: `ebbtide profile --transfers`"
    )
    skipped = NotApplicable("slow-rank", ("two ranks or more",))
    shown = parse(trained().build(), Findings((first, finding), (unknown,), (skipped,)))
    assert shown.texts["summary"] == [
        "Questions that this trace cannot answer: 1",
        "Rules that do not apply: 1",
    ]
    assert "needs two ranks or more" in shown.text
    assert shown.texts["h3"][:2] == ["1Memory is idle", "2The update waits <b>"]
    gains = [" ".join(text.split()) for text, a in zip(shown.texts["p"], shown.attributes("p"), strict=True)
             if a.get("class") == "gain"]  # fmt: skip
    assert gains == [
        "simulated gain 4.00 ms 21 % of an iteration",
        "gain, at most 9.50 ms 50 % of an iteration",
    ]
    assert "DO use it also removes: 2" in shown.text
    assert "DO update elsewhere" in shown.text
    assert {"3 ms", "ebbtide profile --transfers"} <= set(shown.texts["code"])
    assert "Are copies pinned?" in shown.text


def test_page__has_the_share_of_each_phase() -> None:
    content, html = plain_page()
    assert content.phases is not None
    assert column(content.phases, "time") == ["19.0", "4.0", "10.0", "3.0", "2.0"]
    assert column(content.phases, "share") == ["-", "21", "53", "16", "11"]
    assert column(content.phases, "peak device") == [
        "-",
        "30.00",
        "30.00",
        "8.00",
        "10.00",
    ]
    bar = [float(a["width"] or 0) for a in ParsedPage(html).attributes("rect")]
    assert sum(bar) == pytest.approx(100)


def section(view: RankView, name: str) -> Section:
    (named,) = [section for section in view.sections if section.name == name]
    return named


def test_page__shows_who_holds_the_memory_only_where_that_is_known() -> None:
    builder = trained()
    assert "Holders of memory" not in parse(builder.build()).text
    rank = builder.rank(0)
    start_ns = int(rank.frame("phases")["start_ns"].min())
    device = rank.meta["devices"][0]["device"]
    stack = (
        "main (train.py:3)\n_call_impl (torch/nn/modules/module.py:1)\nforward "
        "(model.py:9)"
    )
    rank.add(
        "allocations",
        start_ns=start_ns,
        device=device,
        bytes=300,
        stack=stack,
        category="activation",
    )
    rank.memory(start_ns, 300, "requested", device).memory(
        start_ns + 1, 300, "requested", device
    )
    shown = parse(builder.build()).text
    assert f"300 B of {device} at its peak, " in shown
    assert "activation by forward (model.py:9)" in shown


def test_iteration_table__marks_outliers() -> None:
    builder = trained(20)
    builder.rank(0).phase("update", 20 * ITERATION, 20 * ITERATION + 30 * MS, 20)
    content = build_page(builder.build(), NONE, GIB)
    (view,) = content.ranks
    (table,) = section(view, "iterations").tables
    outliers = [
        cell.is_outlier
        for cell in next(c for c in table.columns if c.label == "update").cells
    ]
    assert outliers == [False] * 20 + [True]
    assert "update 20" in (table.note or "")
    assert render_page(content).count('class="number outlier"') == sum(
        cell.is_outlier for column in table.columns for cell in column.cells
    )


def test_iteration_table__cuts_a_long_table_and_says_so() -> None:
    (view,) = build_page(trained(300).build(), NONE, GIB).ranks
    (table,) = section(view, "iterations").tables
    assert len(table.rows) == 200
    assert (
        table.cut
        == "The first 200 of 300 rows: ebbtide summary --by iteration --json has more."
    )


@pytest.mark.parametrize(
    ("builder", "says"),
    [
        (TraceBuilder(), "has no ranks"),
        (trained(0), "No phases were recorded, so there are no iterations"),
        (trained(devices=[]), "The capacity of rank 0's device is not known"),
        (trained(), "No GPU link was recorded"),
    ],
    ids=["nothing", "no-iterations", "no-capacity", "no-link"],
)
def test_page__says_what_is_missing(builder: TraceBuilder, says: str) -> None:
    trace = builder.build()
    assert says in parse(trace, find(trace)).text


def test_page__has_commands_as_code_and_no_raw_backticks() -> None:
    builder = trained(ranks=2)
    builder.note("imported by `convert.py`")
    builder.rank(0).transfer("h2d", 0, MS, 5, name="copy `a`")
    shown = [
        parse(trace, find(trace)) for trace in (builder.build(), TraceBuilder().build())
    ]
    assert not any("`" in page.text for page in shown)
    assert "convert.py" in shown[0].texts["code"]


def test_page__needs_only_phases_or_memory() -> None:
    phases, memory = TraceBuilder(), TraceBuilder("imported")
    phases.rank(0, devices=[GPU]).phase("forward", 0, 5 * MS, 0).phase(
        "update", 5 * MS, 6 * MS, 0
    )
    memory.rank(0, devices=[GPU]).memory(0, 10 * GIB).memory(
        8 * MS, 39 * GIB + 1
    ).memory(9 * MS, GIB)
    only_phases, only_memory = parse(phases.build()), parse(memory.build())
    assert only_phases.text.lower().count("no memory of a device was recorded") == 2
    assert "an imported run" in only_memory.texts["header"][0]
    assert "Times count from the start of the trace" in only_memory.text


def test_page__says_that_a_trace_is_simulated() -> None:
    assert (
        "a simulation" in parse(trained(source="simulated").build()).texts["header"][0]
    )


@needs_all_features
def test_page__of_many_ranks_shows_representative_ones_and_a_heat_map() -> None:
    trace = fleet(
        11,
        8,
        {7: {"forward": 1.5}, 9: {"bytes": 4 * GIB}, 0: {"update": 0.7}},
        noise=0.001,
    )
    content = build_page(trace, find(trace), GIB)
    shown_ranks = {view.rank: view.reason for view in content.ranks}
    assert (shown_ranks[7], shown_ranks[0]) == ("slowest, slow forward", "fastest")
    assert shown_ranks[9].endswith("less free memory")
    assert len(content.ranks) in (3, 4)
    assert content.omitted_ranks is not None
    assert "drawn are 7 (slowest, slow forward), " in content.omitted_ranks
    assert (
        f"{11 - len(content.ranks)} more ranks are not drawn: --rank N draws another "
        "one" in content.omitted_ranks
    )
    assert content.differences is not None
    assert [row[0].text for row in content.differences.rows] == ["rank 7", "rank 9"]
    assert content.compared is not None
    assert len(content.compared.rows) == 11
    shown = ParsedPage(render_page(content))
    assert "`" not in shown.text
    assert [a["value"] for a in shown.attributes("option")] == [
        str(rank) for rank in shown_ranks
    ]
    assert [a["src"][:22] for a in shown.attributes("img")] == [
        "data:image/png;base64,"
    ]
    hidden = [
        "hidden" in a for a in shown.attributes("div") if a.get("class") == "rank"
    ]
    assert hidden == 2 * ([False] + [True] * (len(shown_ranks) - 1))
    with pytest.raises(TraceError, match="no rank 12"):
        build_page(trace, NONE, GIB, ranks=[12])


def test_page__of_few_ranks_shows_all_or_those_asked_for() -> None:
    trace = trained(ranks=3).build()
    content = build_page(trace, NONE, GIB)
    assert (
        [view.rank for view in content.ranks],
        content.heat,
        content.omitted_ranks,
    ) == ([0, 1, 2], None, None)
    assert [
        view.rank for view in build_page(trace, NONE, GIB, ranks=[2, 0, 2]).ranks
    ] == [2, 0]


@pytest.mark.parametrize(
    "meta", [{"ended_wall_ns": 10**40}, {"host": 3}], ids=["time", "host"]
)
def test_page__refuses_damaged_metadata(meta: dict[str, Any]) -> None:
    with pytest.raises(
        TraceError,
        match=f"is damaged: {next(iter(meta))} in its meta.json is not valid",
    ):
        build_page(TraceBuilder("imported", **meta).build(), NONE, GIB)
