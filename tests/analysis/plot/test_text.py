"""Tests texts of figures: none overlaps another one or the edge, for any content."""

from __future__ import annotations

import io
import itertools
import re

import pytest

from ebbtide.analysis.plot import draw
from ebbtide.analysis.plot.figure import save
from ebbtide.profiler.trace import Trace, TraceBuilder
from tests.analysis.plot.pictures import (
    GPU,
    LINKED,
    MIB,
    MS,
    labels,
    numbers,
    outside,
    overlapping,
    train,
    trained,
    with_counters,
)
from tests.conftest import slow, slow_case

KINDS = ["both", "memory", "link", "windows"]
LOG = "log-20B-tp1-dp4-l40-h5120-a64-sl2048-gbs4-mbs1-ratio1.0-subg100000000-prefetch1-flush_async1-opt_gaps2-again-{}"


def crowded(name: str, iterations: int) -> Trace:
    """Build a trace of several ranks with everything that a legend lists."""
    builder = TraceBuilder()
    for number in range(3):
        rank = train(
            builder.rank(
                number,
                devices=[{**LINKED, "name": "a card with quite a long name indeed"}],
            ),
            iterations,
        )
        for index, pool in enumerate(("reserved", "allocated", "requested", "tensors")):
            rank.memory(0, (10 + index) * MIB, pool)
        for index, pool in enumerate(("rss", "pinned", "swap", "host")):
            rank.memory(0, (500 + index) * MIB, pool, "cpu")
        for index, kind in enumerate(("pinned", "pageable", None)):
            for direction in ("h2d", "d2h"):
                rank.transfer(
                    direction,
                    (3 + index) * MS,
                    (4 + index) * MS,
                    10**8,
                    host_memory=kind,
                )
    return builder.build(f"{name}.ebb")


@pytest.mark.parametrize(
    ("traces", "kind"),
    # "both" draws memory and windows, too.
    [
        pytest.param(
            traces,
            kind,
            marks=[]
            if (traces, kind) in ((1, "windows"), (2, "both"))
            else pytest.mark.slow,
        )
        for traces in (1, 2, 6)
        for kind in KINDS
    ],
)
def test_draw__keeps_texts_of_crowded_traces_apart(kind: str, traces: int) -> None:
    figure = draw(
        [crowded(LOG.format(n), 3 + 20 * n) for n in range(traces)],
        kind=kind,
        min_bytes=MIB,
    )
    assert overlapping(figure) == []
    assert outside(figure) == []


@pytest.mark.parametrize(
    ("kind", "iterations"),
    [
        slow_case("both", 1),
        ("both", 85),
        pytest.param("both", 3000, marks=pytest.mark.slow),
        slow_case("windows", 30),
        pytest.param("windows", 400, marks=pytest.mark.slow),
    ],
)
def test_draw__numbers_some_of_many_iterations(kind: str, iterations: int) -> None:
    figure = draw([with_counters(iterations)], kind=kind, min_bytes=MIB)
    drawn = numbers(figure.axes[0])
    assert 1 <= len(drawn) <= 60
    assert len({second - first for first, second in itertools.pairwise(drawn)}) <= 1
    assert overlapping(figure) == []
    assert outside(figure) == []


def test_draw__numbers_short_iterations_after_a_long_one() -> None:
    builder = TraceBuilder()
    rank = builder.rank(0, devices=[GPU]).phase("forward", 0, 9000 * MS, 0).memory(0, 5)
    for number in range(1, 40):
        rank.phase(
            "forward", (9000 + 3 * number) * MS, (9002 + 3 * number) * MS, number
        )
    figure = draw([builder.build()])
    assert numbers(figure.axes[0])
    assert overlapping(figure) == []


def test_draw__shortens_long_names_in_the_middle() -> None:
    name = LOG.format("and-again" * 9)
    (panel,) = draw([trained(name=name)]).axes
    head, tail = panel.get_title(loc="left").split("…")
    assert name.startswith(head)
    assert name.endswith(tail)
    assert len(head) + len(tail) > 80
    (panel,) = draw([trained(name=LOG.format(1))]).axes
    assert panel.get_title(loc="left") == LOG.format(1)


def test_draw__shortens_long_pool_names() -> None:
    builder = TraceBuilder()
    train(builder.rank(0, devices=[GPU])).memory(
        0, 5 * MIB, "a pool of " + "very " * 60 + "small things"
    )
    figure = draw([builder.build()])
    assert figure.axes[0].get_position().width > 0.6
    assert outside(figure) == []
    assert any(
        re.fullmatch("a pool of .*….* small things", text)
        for text in labels(figure.axes[0])
    )


def test_draw__names_traces_of_one_name_by_path() -> None:
    figure = draw([trained(name="a/run"), trained(name="b/run"), trained(name="other")])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "a/run.ebb",
        "b/run.ebb",
        "other",
    ]


@pytest.mark.parametrize(
    "name",
    slow(
        ["a $b$ c", "$x", "_run", "two\nlines", "\udcff", "漢字", "<&>"], but=["\udcff"]
    ),
)
def test_save__writes_unusual_names_in_every_format(name: str) -> None:
    figure = draw([trained(name=name)])
    for format, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        file = io.BytesIO()
        save(figure, file, format)
        assert file.getvalue().startswith(begins)


def test_save__writes_the_title_as_metadata() -> None:
    figure = draw([trained(), trained(name="other")], kind="windows", min_bytes=MIB)
    files = {}
    for format in ("png", "svg", "pdf"):
        file = io.BytesIO()
        save(figure, file, format)
        files[format] = file.getvalue()
    title = b"ebbtide: windows of free memory of trained, other"
    assert title in files["png"]
    assert title in files["pdf"]
    assert re.findall(rb"<title>(.*)</title>", files["svg"]) == [title]
