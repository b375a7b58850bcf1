"""The graph of call stacks on the page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbtide.analysis.metrics.holders.holders import StackNode
from ebbtide.analysis.report.rank import stack_graph
from tests.analysis.report.report_traces import trained
from tests.analysis.report.test_report import parse
from tests.conftest import examples

SVG = "{http://www.w3.org/2000/svg}"
LABELS = st.sampled_from(["activation", "main (train.py:3)", '<module> ("a&b".py:1)'])
PATHS = st.lists(st.tuples(st.lists(LABELS, min_size=1, max_size=4), st.integers(1, 1000)), min_size=1, max_size=20)


@settings(max_examples=examples(40, by_default=8))
@given(PATHS)
def test_stack_graph__frames_lie_inside_of_their_callers_and_none_overlap(paths: list[tuple[list[str], int]]) -> None:
    root = StackNode("requested")
    for labels, size in paths:
        root.add(labels, size)
    graph = ElementTree.fromstring(stack_graph(root))
    rectangles = [
        (float(r.attrib["y"]), float(r.attrib["x"]), float(r.attrib["x"]) + float(r.attrib["width"]))
        for r in graph.iter("rect")
    ]
    assert rectangles[0][1:] == (0.0, 1000.0)
    for top, left, right in rectangles[1:]:
        assert any(t < top and low - 0.1 <= left and right <= high + 0.1 for t, low, high in rectangles)
        others = [r for r in rectangles if r[0] == top and r != (top, left, right)]
        assert all(right <= low + 0.1 or high <= left + 0.1 for _, low, high in others)


def test_stack_graph__labels_are_text() -> None:
    root = StackNode("requested")
    root.add(["activation", "<b>x</b> (train.py:3)"], 5)
    graph = stack_graph(root)
    assert "<b>" not in graph
    assert [title.text for title in ElementTree.fromstring(graph).iter("title")][2].startswith("<b>x</b> (train.py:3)")
    assert re.search(r'<g class="activation">', graph)


def test_page__shows_who_holds_the_memory_only_where_that_is_known() -> None:
    builder = trained()
    assert "Who holds the memory" not in parse(builder.build()).text
    rank = builder.rank(0)
    start_ns = int(rank.frame("phases")["start_ns"].min())
    device = rank.meta["devices"][0]["device"]
    stack = "main (train.py:3)\n_call_impl (torch/nn/modules/module.py:1)\nforward (model.py:9)"
    rank.add("allocations", start_ns=start_ns, device=device, bytes=300, stack=stack, category="activation")
    rank.memory(start_ns, 300, "requested", device).memory(start_ns + 1, 300, "requested", device)
    shown = parse(builder.build())
    assert "Who holds the memory" in shown.text
    assert "forward (model.py:9): 300 B (100.0%)" in shown.text
