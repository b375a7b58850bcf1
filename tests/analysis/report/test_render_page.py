"""Tests that nothing of a trace becomes code in a page, and what the page is made
of."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from ebbtide.analysis.findings import Finding, Findings, Unknown
from ebbtide.analysis.plot import LINK_COLORS, PHASE_COLORS
from ebbtide.analysis.report import write_report
from ebbtide.analysis.report.page_panels import page_panels
from ebbtide.analysis.timeline.axis import TimeAxis, recorded_interval
from ebbtide.analysis.timeline.styles import COLORS
from ebbtide.profiler.trace import TraceBuilder
from tests.analysis.report.parsed_page import NONE, ParsedPage, html_of, plain_page
from tests.analysis.report.report_traces import GIB, HOSTILE, hostile, long


def test_render_page__escapes_everything_of_a_trace() -> None:
    trace = hostile()
    finding = Finding("rule", HOSTILE, 1.0, (HOSTILE,), HOSTILE)
    html = html_of(trace, Findings((finding,), (Unknown("rule", HOSTILE, HOSTILE),)))
    shown = ParsedPage(html)
    types = [a.get("type") for a in shown.attributes("script")]
    assert types.count("application/json") == 1
    running = [
        text
        for kind, text in zip(types, shown.texts["script"], strict=True)
        if kind is None
    ]
    assert not any("title='owned" in text for text in running)
    assert "img" not in shown.texts
    assert not any(
        name.startswith("on") for _, attributes in shown.elements for name in attributes
    )
    assert shown.text.count(HOSTILE.replace("\u2028", "").strip()) >= 10
    data = json.loads(shown.texts["script"][0])
    assert data["root_id"]
    assert "</script" not in html.split('type="application/json"')[1].split("\n")[
        0
    ].removesuffix("</script>")


def test_render_page__allows_only_its_own_scripts() -> None:
    shown = ParsedPage(plain_page()[1])
    (policy,) = [a["content"] for a in shown.attributes("meta") if a.get("http-equiv")]
    scripts = [
        text
        for text, attributes in zip(
            shown.texts["script"], shown.attributes("script"), strict=True
        )
        if "type" not in attributes
    ]
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in scripts
    ]
    assert policy is not None
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "script-src": " ".join(f"'sha256-{digest}'" for digest in hashes),
    }
    links = [
        attributes["href"] or ""
        for _, attributes in shown.elements
        if "href" in attributes
    ]
    assert all(link.startswith("#") for link in links)
    assert not any("src" in attributes for _, attributes in shown.elements)


def test_render_page__omits_bokeh_without_a_timeline() -> None:
    html = html_of(TraceBuilder().build())
    assert len(html) < 50_000


@pytest.mark.slow
def test_write_report__stays_below_five_megabytes_for_a_long_trace(
    tmp_path: Path,
) -> None:
    trace = long()
    write_report(trace, NONE, tmp_path / "long.html", 10 * GIB)
    assert (tmp_path / "long.html").stat().st_size < 5_000_000
    shown = ParsedPage((tmp_path / "long.html").read_text())
    assert "phases and windows of one iteration in" in shown.text
    assert "link: means over" in shown.text


def test_render_page__has_a_color_for_every_line_as_in_plots() -> None:
    trace = long()
    (styles,) = ParsedPage(plain_page()[1]).texts["style"]
    colors = dict(re.findall(r"--([\w-]+): (#\w+);", styles.split("@media")[0]))
    assert {**colors, **PHASE_COLORS, **LINK_COLORS} == colors
    assert {
        name: color.light for name, color in COLORS.items()
    }.items() <= colors.items()
    interval = recorded_interval(trace, 0)
    assert interval is not None
    axis = TimeAxis(0, *interval, interval[1] - interval[0])
    lines = [
        line for panel in page_panels(trace, 0, axis, 1000) for line in panel.lines
    ]
    assert {line.style.color for line in lines} | {
        line.style.fill or "h2d" for line in lines
    } <= set(colors)
