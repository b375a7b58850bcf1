"""The report's page: what it says of a trace, and that nothing of a trace becomes code."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import ebbtide.analysis.report as package
from ebbtide.analysis.findings import Finding, Findings, Unknown, find
from ebbtide.analysis.plot import LINK_COLORS, PHASE_COLORS
from ebbtide.analysis.report import page, render, write_report
from ebbtide.analysis.report.columns import Table, counts, milliseconds, sizes, words
from ebbtide.analysis.report.lines import clock, panels
from ebbtide.errors import TraceError
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.metrics.deepspeed_jobs import SIZE, deepspeed_job
from tests.analysis.report.report_traces import GIB, GPU, HOSTILE, ITERATION, MS, hostile, long, trained, with_copies

NONE = Findings((), ())


class Read(HTMLParser):
    """The elements of a page, with their attributes and the text in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.texts.setdefault(tag, []).append("")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join(self.texts["main"][0].split())


def html_of(trace: Trace, findings: Findings = NONE, **more: Any) -> str:
    return render(page(trace, findings, GIB, **more))


def read(trace: Trace, findings: Findings = NONE, **more: Any) -> Read:
    return Read(html_of(trace, findings, **more))


def column(table: Table, label: str) -> list[str]:
    return [cell.text for cell in next(c for c in table.columns if c.label == label).cells]


def test_a_column_has_one_unit_and_its_figures_sort_as_figures() -> None:
    column = sizes("peak", [3 * GIB, None, 512 * 2**20])
    assert (column.unit, [cell.text for cell in column.cells]) == ("GiB", ["3.00", "–", "0.50"])
    assert [cell.value for cell in column.cells] == [3 * GIB, None, 512 * 2**20]
    assert [cell.text for cell in milliseconds("time", [12_345.6, 1.0]).cells] == ["12,346", "1"]


def test_what_no_row_tells_is_no_column() -> None:
    table = Table("t", "T", (words("phase", ["forward"]), counts("copies", [None])))
    assert [c.label for c in table.columns] == ["phase"]
    assert [[cell.text for cell in row] for row in table.rows] == [["forward"]]


def test_the_findings_stand_first_with_their_worth_and_what_could_not_be_told_after_them() -> None:
    finding = Finding("rule", "the update waits <b>", 9.5, ("it takes `3 ms`", "and more"), "update elsewhere")
    idle = Finding("other", "memory is idle", None, (), "use it")
    unknown = Unknown("copies", "are copies pinned?", "record them: `ebbtide profile --transfers`")
    shown = read(trained().build(), Findings((finding, idle), (unknown,)))
    assert shown.texts["h2"][:2] == ["Findings", "Summary"]
    assert shown.texts["h3"][:3] == ["The update waits <b>", "Memory is idle", "What this trace cannot tell"]
    (worth,) = [" ".join(text.split()) for text in shown.texts["p"] if "potential gain" in text]
    assert worth == "potential gain 9.50 ms 50 % of an iteration"
    assert shown.texts["code"][:2] == ["3 ms", "ebbtide profile --transfers"]
    assert "Are copies pinned?" in shown.text
    assert not shown.attributes("b")[0].get("class")


def test_the_summary_says_how_an_iteration_is_shared_out() -> None:
    content = page(trained().build("run.ebb"), NONE, GIB)
    assert (content.name, content.about) == (
        "run",
        "a recorded run · 1 rank · 6 iterations, the first 2 left out as warm-up",
    )
    assert [(f.label, f.value, f.beside) for f in content.figures] == [
        ("iteration", "19 ms", "median of 4"),
        ("peak device memory", "30.00 GiB", "of 40.00 GiB"),
    ]
    assert content.phases is not None
    assert column(content.phases, "median") == ["4.0", "10.0", "3.0", "2.0"]
    assert column(content.phases, "share") == ["21", "53", "16", "11"]
    assert column(content.phases, "peak device") == ["30.00", "30.00", "8.00", "10.00"]
    bar = [float(a["width"] or 0) for a in read(trained().build()).attributes("rect")]
    assert sum(bar) == pytest.approx(100)


def test_windows_iterations_and_copies_have_their_tables() -> None:
    (view,) = page(with_copies(trained()).build(), NONE, 20 * GIB).ranks
    always, longest = view.windows
    assert column(always, "phase") == ["other", "forward", "update"]
    assert set(column(longest, "least free")) == {"30.00", "32.00"}
    assert "at least 20.00 GiB of 40.00 GiB" in view.windows_line
    assert view.iterations is not None
    assert column(view.iterations, "whole") == ["17.0", *["19.0"] * 5]
    assert column(view.iterations, "note")[:3] == ["warm-up", "warm-up", " "]
    by_phase, kinds = view.link
    assert column(kinds, "host memory") == ["pageable", "pinned"] * 2
    assert column(kinds, "copies") == ["6"] * 4
    assert column(kinds, "rate while busy") == ["25.00"] * 4
    assert {"busy", "both ways at once"} <= {c.label for c in by_phase.columns}


def test_the_sub_steps_of_an_update_have_theirs_and_subgroups_one_that_is_cut() -> None:
    (view,) = page(deepspeed_job().build(), NONE, GIB).ranks
    steps, subgroups = view.steps
    assert column(steps, "sub-step")[:2] == ["reduce", "gradient down (in reduce)"]
    place = column(steps, "sub-step").index("parameters")
    assert [column(steps, label)[place] for label in ("time", "of phase", "h2d", "rate", "pageable", "waits for")] == [
        "100.0",
        "28",
        "953.67",
        "13.33",
        "75",
        "h2d",
    ]
    assert column(subgroups, "subgroup")[::5] == ["0", "1", "2", "3", "4"]
    assert subgroups.cut is None
    (view,) = page(deepspeed_job(iterations=1, sizes=(SIZE,) * 30).build(), NONE, GIB).ranks
    assert "ebbtide steps --json has all" in (view.steps[1].cut or "")
    shown = read(deepspeed_job().build())
    assert "Sub-steps" in shown.texts["h2"]
    assert page(trained().build(), NONE, GIB).ranks[0].steps == []


def test_an_iteration_far_from_the_others_is_marked() -> None:
    builder = trained(20)
    builder.rank(0).phase("update", 20 * ITERATION, 20 * ITERATION + 30 * MS, 20)
    (view,) = page(builder.build(), NONE, GIB).ranks
    table = view.iterations
    assert table is not None
    odd = [cell.odd for cell in next(c for c in table.columns if c.label == "update").cells]
    assert odd == [False] * 20 + [True]
    assert "update 20" in (table.note or "")
    assert html_of(builder.build()).count('class="number odd"') == sum(
        cell.odd for column in table.columns for cell in column.cells
    )


def test_a_long_table_is_cut_and_says_so() -> None:
    (view,) = page(trained(300).build(), NONE, GIB).ranks
    assert view.iterations is not None
    assert len(view.iterations.rows) == 200
    assert view.iterations.cut == "The first 200 of 300 rows: ebbtide iterations --json has all."


@pytest.mark.parametrize(
    ("builder", "says"),
    [
        (TraceBuilder(), "holds no rank"),
        (trained(0), "No finished iteration was recorded"),
        (trained(devices=[]), "The capacity of the device is not known"),
        (trained(), "No GPU link was recorded"),
    ],
    ids=["nothing", "no-iterations", "no-capacity", "no-link"],
)
def test_what_is_missing_is_said(builder: TraceBuilder, says: str) -> None:
    trace = builder.build()
    assert says in read(trace, find(trace)).text


def test_phases_alone_and_memory_alone_make_a_page() -> None:
    phases, memory = TraceBuilder(), TraceBuilder("imported")
    phases.rank(0, devices=[GPU]).phase("forward", 0, 5 * MS, 0).phase("update", 5 * MS, 6 * MS, 0)
    memory.rank(0, devices=[GPU]).memory(0, 10 * GIB).memory(8 * MS, 39 * GIB + 1).memory(9 * MS, GIB)
    only_phases, only_memory = read(phases.build()), read(memory.build())
    assert "No memory of a device was recorded" in only_phases.text
    assert "has no memory line of a device" in only_phases.text
    assert "an imported run" in only_memory.texts["header"][0]
    assert "Times count from the start of the trace" in only_memory.text


def test_a_simulation_says_that_it_is_one() -> None:
    assert "a simulation" in read(trained(source="simulated").build()).texts["header"][0]


def test_eight_ranks_are_drawn_and_the_others_named() -> None:
    trace = trained(ranks=11).build()
    content = page(trace, NONE, GIB)
    assert [view.rank for view in content.ranks] == list(range(8))
    assert content.left_out == "3 more ranks are not drawn: --rank N draws another one"
    assert content.compared is not None
    assert len(content.compared.rows) == 11
    shown = Read(render(content))
    assert [a["value"] for a in shown.attributes("option")] == [str(rank) for rank in range(8)]
    hidden = ["hidden" in a for a in shown.attributes("div") if a.get("class") == "rank"]
    assert hidden == [False] + [True] * 7
    assert [view.rank for view in page(trace, NONE, GIB, rank=9).ranks] == [9]
    with pytest.raises(TraceError, match="no rank 12"):
        page(trace, NONE, GIB, rank=12)


def test_the_facts_of_the_job_are_told_and_odd_ones_left_out() -> None:
    builder = TraceBuilder(
        "imported",
        command=["python", "train.py", "a b"],
        started_wall_ns=1_700_000_000 * 10**9,
        ended_wall_ns=10**40,
        imported=[{"file": "run.log", "format": "deepspeed-log"}],
        host=3,
        exit={"signal": 9},
        clock={"name": "unix", "host": None},
        deepspeed="?",
    )
    for rank in range(2):
        builder.rank(rank, devices=[{**GPU, "device": f"cuda:{rank}"}], threads=[1])
    facts = dict(page(builder.build(), NONE, GIB).facts)
    assert facts == {
        "command": "python train.py 'a b'",
        "started": "2023-11-14 22:13:20 UTC",
        "ended": "signal 9",
        "source": "imported from run.log (deepspeed-log)",
        "ranks": "2",
        "device": "2 × a GPU, 40.00 GiB, PCIe 4 x16, 32 GB/s a direction",
        "clock": "unix",
    }


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (
            {"ratio": 0.5, "sizes": (SIZE,) * 3, "devices": ("cuda", "cpu", "cpu")},
            "ZeRO-3, optimizer offloaded to the cpu, a share of 0.5 asked for, 0.67 in fact on the CPU, 3 subgroups of "
            "100 M parameters, 2 of them on the CPU, masters pageable, gradients pinned",
        ),
        (
            {"sizes": (SIZE, 2 * SIZE), "policy": "adaptive", "masters_pinned": True, "gradients_pinned": None},
            "ZeRO-3, updated by ebbtide under adaptive, optimizer offloaded to the cpu, a share of 1 on the CPU, 2 "
            "subgroups of 100 M to 200 M parameters, 2 of them on the CPU, masters pinned",
        ),
    ],
)
def test_the_facts_tell_where_deepspeed_keeps_its_state(meta: dict[str, Any], says: str) -> None:
    facts = dict(page(deepspeed_job(iterations=1, **meta).build(), NONE, GIB).facts)
    assert facts["DeepSpeed"] == says
    assert "DeepSpeed 0.19.8" in facts["software"]


def test_nothing_from_a_trace_becomes_code() -> None:
    trace = hostile()
    finding = Finding("rule", HOSTILE, 1.0, (HOSTILE,), HOSTILE)
    html = html_of(trace, Findings((finding,), (Unknown("rule", HOSTILE, HOSTILE),)))
    shown = Read(html)
    types = [a.get("type") for a in shown.attributes("script")]
    assert types.count("application/json") == 1
    running = [text for kind, text in zip(types, shown.texts["script"], strict=True) if kind is None]
    assert not any("title='owned" in text for text in running)
    assert "img" not in shown.texts
    assert not any(name.startswith("on") for _, attributes in shown.elements for name in attributes)
    assert shown.text.count(HOSTILE.replace("\u2028", "").strip()) >= 10
    data = json.loads(shown.texts["script"][0])
    assert data["root_id"]
    assert "</script" not in html.split('type="application/json"')[1].split("\n")[0].removesuffix("</script>")


def test_the_policy_names_each_script_by_its_hash_and_nothing_else() -> None:
    shown = read(trained().build())
    (policy,) = [a["content"] for a in shown.attributes("meta") if a.get("http-equiv")]
    scripts = [
        text
        for text, attributes in zip(shown.texts["script"], shown.attributes("script"), strict=True)
        if "type" not in attributes
    ]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in hashes),
    }
    assert not any(name in ("src", "href") for _, attributes in shown.elements for name in attributes)


def test_a_page_without_a_timeline_does_without_bokeh() -> None:
    html = html_of(TraceBuilder().build())
    assert len(html) < 50_000


@pytest.mark.slow
def test_a_long_trace_makes_a_page_under_five_megabytes(tmp_path: Path) -> None:
    trace = long()
    write_report(trace, NONE, tmp_path / "long.html", 10 * GIB)
    assert (tmp_path / "long.html").stat().st_size < 5_000_000
    shown = Read((tmp_path / "long.html").read_text())
    assert "phases and windows are drawn for one iteration in" in shown.text
    assert "mean rates over" in shown.text


def test_every_line_has_a_colour_and_phases_and_directions_those_of_the_pictures() -> None:
    styles = (Path(package.__file__).parent / "templates" / "page.css").read_text()
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", styles.split("@media")[0]))
    assert {**colors, **PHASE_COLORS, **LINK_COLORS} == colors
    trace = long()
    at = clock(trace, 0)
    assert at is not None
    assert {line.color for panel in panels(trace, 0, at, 1000) for line in panel.lines} <= set(colors)
    assert {f"pool-{number}" for number in range(1, 9)} <= set(colors)
